"""What a simulation assumes beyond the plan: stragglers, noise, busy links, the optimizer's memory."""

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
    link_jitter: float = 0.0
    """The same on the time that each activation and gradient takes on its way. Where links are slow, ranks that never
    vary may fall into step with each other for ever, and stay slower than any real ones."""
    seed: int = 0
    """Of the jitters; each rank, and each way from one to another, draws from a stream of its own."""
    contention: Mapping[int, float] = field(default_factory=dict)
    """By level, the fraction of its bandwidth that other traffic leaves."""
    shared_ports: bool = True
    """Whether the workers of a host share its network card: a link above the innermost level then ends at the group
    below it; otherwise every worker has one of its own at each level."""
    overlap: bool = True
    """Whether replicas exchange gradients while the backward still runs, in buckets, as DDP does."""
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
            if not 1e-6 <= factor <= 1e6:
                raise ConfigError(f"slowdown of rank {rank} is {factor}; give a factor from 1e-6 to 1e6, 1 for none")
        for level, left in self.contention.items():
            if not 1e-6 <= left <= 1:
                raise ConfigError(f"contention of level {level} is {left}; give the fraction left, from 1e-6 to 1")
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed}; give 0 or more")
        if not 1e-6 <= self.activation_compression_ratio <= 1e6:
            raise ConfigError(
                f"activation_compression_ratio={self.activation_compression_ratio}; give 1e-6 to 1e6, 1 for none"
            )
        for name, most in (
            ("jitter", 10.0),
            ("link_jitter", 10.0),
            ("update_s", 1e6),
            ("optimizer_state_factor", 1e3),
        ):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(f"{name}={value}; give 0 to {most:g}")


UNDISTURBED = SimulationOptions()
