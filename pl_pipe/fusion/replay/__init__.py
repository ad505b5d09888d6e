"""A step as operations that run again without its Python. step -> *traced* -> *compiled* -> *captured*."""

from pl_pipe.fusion.replay.compiling import compiled
from pl_pipe.fusion.replay.graphs import Branch, Capture, captured, nothing, warm_up
from pl_pipe.fusion.replay.operations import OperationsDifferError
from pl_pipe.fusion.replay.sharing import Divided, divided
from pl_pipe.fusion.replay.tracing import Traced, follow, trace

__all__ = [
    "Branch", "Capture", "Divided", "OperationsDifferError", "Traced", "captured", "compiled", "divided", "follow",
    "nothing", "trace", "warm_up",
]  # fmt: skip
