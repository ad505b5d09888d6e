"""The configuration of `strategy=adaptive`."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class AdaptiveConfig:
    """Data parallel over a topology that can be chosen, and changed while training runs."""

    _target_: str = "pl_pipe.strategies.adaptive_config.adaptive"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    topology: Any = "auto"
    """`native` (the backend's all_reduce), `star`, `star@RANK`, `multi_star`, `ring`, `clique`, `tree`, `binary_tree`,
    `binary_tree_star`, `multi_binary_tree_star`, `minimum_spanning_tree` (measured), `auto` (the quickest, measured),
    or a father for each rank, such as [0,0,0,1]."""
    adapt: bool = True
    """Ranks watch their links, and change the topology while other traffic slows most of them down."""
    bucket_cap_mb: float = 25.0
    """Gradients leave in buckets of so many MB while backward goes on."""
    piece_mb: float = 2.0
    """What travels at a time, for each tree of the topology (a ring or a clique has as many as ranks)."""
    find_unused_parameters: bool = False
    backend: str | None = None
    """Of the native sum: `gloo` or `nccl`; null takes gloo on CPU and NCCL on CUDA."""
    timeout_s: float = 300.0
    """A peer that is silent for longer is an error."""


def adaptive(**settings: Any) -> object:
    from pl_pipe.strategies.adaptive import AdaptiveCommStrategy  # composing a configuration must stay quick

    return AdaptiveCommStrategy(**settings)
