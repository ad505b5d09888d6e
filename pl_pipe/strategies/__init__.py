"""Strategies: thin adapters between Lightning's hooks and the runtime. What only one kind needs is in its folder."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_pipe.strategies.adaptive import AdaptiveCommStrategy
    from pl_pipe.strategies.auto import AutoStrategy
    from pl_pipe.strategies.fusion.ddp import FusionDDPStrategy
    from pl_pipe.strategies.fusion.strategy import FusionStrategy
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy
    from pl_pipe.strategies.uneven.ad_psgd import ADPSGDStrategy
    from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy
    from pl_pipe.strategies.uneven.hetpipe import HetPipeStrategy
    from pl_pipe.strategies.uneven.partial_reduce import PartialReduceStrategy
    from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy

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
    "ADPSGDStrategy": "uneven.ad_psgd",
    "AdaptiveCommStrategy": "adaptive",
    "AutoStrategy": "auto",
    "DataParallelStrategy": "uneven.data_parallel",
    "FusionDDPStrategy": "fusion.ddp",
    "FusionStrategy": "fusion.strategy",
    "HetPipeStrategy": "uneven.hetpipe",
    "PartialReduceStrategy": "uneven.partial_reduce",
    "PipeDreamStrategy": "pipeline.pipedream",
    "SDPipeStrategy": "uneven.sdpipe",
}


def __getattr__(name: str) -> Any:
    """On first use: composing a configuration must not wait for Lightning."""
    if name in _PLACES:
        found = getattr(importlib.import_module(f"pl_pipe.strategies.{_PLACES[name]}"), name)
        other: Any = sys.modules.get("pytorch_lightning.strategies")
        if other is not None:
            other.Strategy.register(found)  # else its Trainer would refuse ours without a word of the remedy
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
