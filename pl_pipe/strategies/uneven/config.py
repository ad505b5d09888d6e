"""The configurations of data parallelism among uneven workers: one with all options, and one for each rule by name."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.strategies.pipeline.pipedream_config import PipeDreamConfig
from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class _Workers:
    """What all have in common."""

    about: StrategyAbout = field(default_factory=StrategyAbout)
    on_fault: str | None = None
    """When a worker ends (rank 0 excepted): the others `leave` it behind or `stop`; null leaves it where they can."""
    timeout_s: float = 300.0
    """A peer that is silent for longer is an error."""


@dataclass
class PartialReduceConfig(_Workers):
    """Averaging with whoever is ready."""

    _target_: str = "pl_pipe.strategies.uneven.config.partial_reduce"
    synchronizer: str = "partial_reduce"
    """Another rule for comparison: `allreduce`, `ad_psgd`, `sma`, `pair`, `wave` or `local`."""
    every: int = 1
    """Updates of its own after which a worker averages with others."""
    averaging: str = "constant"
    """`constant`: members count alike; `dynamic`: those with fewer steps behind them count less."""
    alpha: float = 0.5
    """For `dynamic`: how much less."""
    first_wait_s: float = 0.001
    """How long a worker waits for others at first; it adapts."""
    shortest_wait_s: float = 0.00001
    longest_wait_s: float = 0.01
    group_size: int | None = None
    """Members of a group at most; null is any number."""
    connect_every: int = 10
    """Rounds after which groups see to it that all workers are connected."""
    pairs_above: int = 8
    """With more workers than this, groups are pairs."""


@dataclass
class ADPSGDConfig(_Workers):
    """Asynchronous averaging in pairs."""

    _target_: str = "pl_pipe.strategies.uneven.config.ad_psgd"
    synchronizer: str = "ad_psgd"
    every: int = 1
    """Steps of which the last begins an averaging."""
    matching: bool = False
    """Pairs all workers anew in every step, by a draw that all make alike, and waits for the partner (SD-Pipe's)."""
    seed: int = 0


@dataclass
class HetPipeConfig(_Workers):
    """Waves, and a bound on how far workers are apart."""

    _target_: str = "pl_pipe.strategies.uneven.config.hetpipe"
    synchronizer: str = "wave"
    wave: int = 4
    """Steps in a wave."""
    distance: int = 0
    """Waves that a worker may be ahead of the slowest."""
    servers: int | None = None
    """Workers that keep a part of the parameter server; null is all."""


@dataclass
class DataParallelConfig(PartialReduceConfig):
    """Any rule, with its options."""

    _target_: str = "pl_pipe.strategies.uneven.config.data_parallel"
    synchronizer: str = "allreduce"
    matching: bool = False
    seed: int = 0
    pull: float = 0.1
    """For `sma`: the share of the mean in a step."""
    wave: int = 4
    distance: int = 0
    servers: int | None = None


@dataclass
class SDPipeConfig(PipeDreamConfig):
    """Pipelines, and what their stages do with one another."""

    _target_: str = "pl_pipe.strategies.uneven.config.sdpipe"
    plan: str = "auto"
    """The quickest with one device a stage; or the path of such a plan.json."""
    synchronizer: str = "partial_reduce"
    """Among the replicas of a stage: `partial_reduce`, `allreduce`, `ad_psgd`, `sma`, `pair`, `wave` or `local`."""
    pipelines: int | None = None
    """How many; null is two, or the columns of `placement`."""
    placement: list[list[int]] | None = None
    """Devices by stage (rows) and pipeline (columns), such as [[0,2],[1,3]]; null gives pipelines neighbouring ones."""
    every: int = 1
    """Updates of its own after which a stage averages with its replicas."""
    averaging: str = "constant"
    alpha: float = 0.5
    first_wait_s: float = 0.001
    shortest_wait_s: float = 0.00001
    longest_wait_s: float = 0.01
    group_size: int | None = None
    connect_every: int = 10
    pairs_above: int = 8
    matching: bool = False
    seed: int = 0
    pull: float = 0.1
    wave: int = 4
    distance: int = 0
    servers: int | None = None
    """These are `data_parallel`'s."""
    on_fault: str | None = None
    """When a rank ends, and with it its pipeline (the first excepted): the others `leave` it behind or `stop`."""


# Lightning is imported inside: composing a configuration must stay quick.


def partial_reduce(**settings: Any) -> object:
    from pl_pipe.strategies.uneven.partial_reduce import PartialReduceStrategy

    return PartialReduceStrategy(**settings)


def ad_psgd(**settings: Any) -> object:
    from pl_pipe.strategies.uneven.ad_psgd import ADPSGDStrategy

    return ADPSGDStrategy(**settings)


def hetpipe(**settings: Any) -> object:
    from pl_pipe.strategies.uneven.hetpipe import HetPipeStrategy

    return HetPipeStrategy(**settings)


def sdpipe(**settings: Any) -> object:
    from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy

    return SDPipeStrategy(**settings)


def data_parallel(**settings: Any) -> object:
    from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy

    return DataParallelStrategy(**settings)
