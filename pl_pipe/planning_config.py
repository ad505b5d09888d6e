"""The settings of the commands that plan, simulate and rehearse, typed; nothing here needs torch."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.cluster import ClusterConfig
from pl_pipe.simulate.sweep import BANDWIDTHS, WORKERS


@dataclass
class PlanConfig:
    """How a plan is made; see `pl_pipe.partition.partition`."""

    out: str | None = None
    """The file to write, `.json`; null is plan.json beside the profile. The graph and the picture go beside it."""
    cost_model: str = "overlap"
    """`overlap` (what the runtime does) or `pipedream` (the original's closed form)."""
    activation_compression_ratio: float | None = None
    straight: bool = False
    memory_bytes: float | None = None
    optimizer_state_factor: float = 2.0
    use_fewer: bool = False
    split_after: list[str] | None = None
    """A split by hand: the last layer or module of each stage but the last."""
    replicas: list[int] | None = None
    """Replicas of each stage of a split by hand; null is one each."""


@dataclass
class PlanRoot:
    """The root of `pl-pipe plan`."""

    profile: str | None = None
    """A `profile.json`, or a `graph.txt` of PipeDream's."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass
class PlanFileConfig:
    """The plan to simulate."""

    path: str | None = None


@dataclass
class SimulateConfig:
    """What a simulation assumes; see `pl_pipe.simulate.SimulationOptions`."""

    out: str | None = None
    """The folder to write to; null is one beside the plan, named after it and the schedule."""
    slowdown: Any = None
    """By rank: `simulate.slowdown={3:2.0}` makes rank 3 take twice as long."""
    jitter: float = 0.0
    link_jitter: float = 0.0
    seed: int = 0
    contention: Any = None
    """By level of the cluster, the fraction of its bandwidth that other traffic leaves: `{1:0.5}`."""
    shared_ports: bool = True
    overlap: bool = True
    update_s: float = 0.0
    optimizer_state_factor: float | None = None
    """Null is what the plan was made with; so is it below."""
    activation_compression_ratio: float | None = None


@dataclass
class SimulateRoot:
    """The root of `pl-pipe simulate`."""

    plan: PlanFileConfig = field(default_factory=PlanFileConfig)
    profile: str | None = None
    """If given, the plan must be for the model of this profile."""
    schedule: str = "pipedream"
    batches: int | None = None
    """Mini-batches to run; null is enough for a steady state."""
    accumulate: int | None = None
    """Mini-batches that share an update (pipedream_2bw, 1f1b, gpipe); null is enough to keep every rank busy."""
    update: str = "round"
    """When a pipedream stage updates: `round` or `minibatch`."""
    deeper: float = 0.0
    """Mini-batches in flight beyond the published rule, for each rank behind: 1 hides slow links."""
    simulate: SimulateConfig = field(default_factory=SimulateConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """If it describes one: another cluster than the plan's."""


@dataclass
class SweepConfig:
    """The clusters of a sweep."""

    out: str | None = None
    """The folder to write to; null is the profile's."""
    workers: list[int] = field(default_factory=lambda: list(WORKERS))
    bandwidths: list[float] = field(default_factory=lambda: list(BANDWIDTHS))


@dataclass
class SweepRoot:
    """The root of `pl-pipe sweep`."""

    profile: str | None = None
    plan: PlanConfig = field(default_factory=PlanConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


@dataclass
class LabRoot:
    """The root of `pl-pipe lab run` and `up`."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    output_root: str = "outputs"
    """The hosts' output goes to `lab/` in it."""


ROOTS: dict[str, type] = {"plan": PlanRoot, "simulate": SimulateRoot, "sweep": SweepRoot, "lab": LabRoot}
