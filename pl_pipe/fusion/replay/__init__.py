"""A step as operations that run again without its Python. step -> *traced* -> *compiled* -> *captured*."""

from pl_pipe.fusion.replay.compiling import compiled
from pl_pipe.fusion.replay.graphs import Branch, Capture, captured, warm_up
from pl_pipe.fusion.replay.operations import OperationsDifferError
from pl_pipe.fusion.replay.tracing import Traced, follow, trace

__all__ = [
    "Branch", "Capture", "OperationsDifferError", "Traced", "captured", "compiled", "follow", "trace", "warm_up",
]  # fmt: skip
