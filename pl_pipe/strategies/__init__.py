"""Strategies: thin adapters between Lightning's hooks and the runtime, one file each."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_pipe.strategies.ad_psgd import ADPSGDStrategy
    from pl_pipe.strategies.adaptive import AdaptiveCommStrategy
    from pl_pipe.strategies.auto import AutoStrategy
    from pl_pipe.strategies.fusion import FusionStrategy
    from pl_pipe.strategies.fusion_ddp import FusionDDPStrategy
    from pl_pipe.strategies.hetpipe import HetPipeStrategy
    from pl_pipe.strategies.partial_reduce import PartialReduceStrategy
    from pl_pipe.strategies.pipedream import PipeDreamStrategy
    from pl_pipe.strategies.sdpipe import SDPipeStrategy
    from pl_pipe.strategies.uneven import DataParallelStrategy

__all__ = [
    "ADPSGDStrategy",
    "AdaptiveCommStrategy",
    "AutoStrategy",
    "DataParallelStrategy",
    "FusionDDPStrategy",
    "FusionStrategy",
    "HetPipeStrategy",
    "PartialReduceStrategy",
    "PipeDreamStrategy",
    "SDPipeStrategy",
]

_PLACES = {
    "ADPSGDStrategy": "ad_psgd",
    "AdaptiveCommStrategy": "adaptive",
    "AutoStrategy": "auto",
    "DataParallelStrategy": "uneven",
    "FusionDDPStrategy": "fusion_ddp",
    "FusionStrategy": "fusion",
    "HetPipeStrategy": "hetpipe",
    "PartialReduceStrategy": "partial_reduce",
    "PipeDreamStrategy": "pipedream",
    "SDPipeStrategy": "sdpipe",
}


def __getattr__(name: str) -> Any:
    """On first use: composing a configuration must not wait for Lightning."""
    if name in _PLACES:
        return getattr(importlib.import_module(f"pl_pipe.strategies.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
