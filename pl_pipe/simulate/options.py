"""What a simulation assumes beyond the plan: stragglers, noise, busy links, the optimizer's memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pl_pipe.errors import ConfigError


@dataclass(frozen=True)
class SimulationOptions:
    """Knobs of `simulate`; the defaults are an undisturbed cluster."""

    slowdown: Mapping[int, float] = field(default_factory=dict)
    """By rank, how many times longer its forwards, backwards and updates take."""
    jitter: float = 0.0
    """Sigma of a lognormal factor of mean 1 on each forward and backward."""
    seed: int = 0
    """Of the jitter; each rank draws from a stream of its own."""
    contention: Mapping[int, float] = field(default_factory=dict)
    """By level, the fraction of its bandwidth that other traffic leaves."""
    shared_ports: bool = True
    """Whether the workers of a host share its network card: a link above the innermost level then ends at the group
    below it; otherwise every worker has one of its own at each level."""
    overlap: bool = True
    """Whether replicas exchange gradients while the backward still runs, in buckets, as DDP does."""
    all_reduce_slices: int = 8
    """Parts of an all-reduce between which other messages may pass."""
    update_s: float = 0.0
    """What the optimizer takes for one update, once the gradients are there."""
    optimizer_state_factor: float = 2.0
    """The optimizer's state in multiples of the parameters: 0 for plain SGD, 1 for momentum, 2 for Adam; as in
    `partition`."""
    activation_compression_ratio: float = 1.0
    """How many times smaller activations and gradients are on the wire than in the plan."""
    record_events: bool = True
    """Off saves memory and time where nobody draws a timeline."""

    def __post_init__(self) -> None:
        for rank, factor in self.slowdown.items():
            if not (math.isfinite(factor) and factor > 0):
                raise ConfigError(f"slowdown of rank {rank} is {factor}; give a factor over 0, 1 for none")
        for level, left in self.contention.items():
            if not 0 < left <= 1:
                raise ConfigError(f"contention of level {level} is {left}; give the fraction left, over 0 up to 1")
        if self.all_reduce_slices < 1:
            raise ConfigError(f"all_reduce_slices={self.all_reduce_slices}; give 1 or more")
        if not (math.isfinite(self.activation_compression_ratio) and self.activation_compression_ratio > 0):
            raise ConfigError(
                f"activation_compression_ratio={self.activation_compression_ratio}; give over 0, 1 for none"
            )
        for name in ("jitter", "update_s", "optimizer_state_factor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value}; give 0 or more")


UNDISTURBED = SimulationOptions()
