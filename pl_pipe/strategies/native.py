"""Lightning's own strategies, passed through: the plain ways that every strategy of ours is compared with."""

from dataclasses import dataclass, field
from datetime import timedelta

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class SingleConfig:
    """One process, one device."""

    _target_: str = "pl_pipe.strategies.native.single"
    about: StrategyAbout = field(default_factory=StrategyAbout)


@dataclass
class DDPConfig:
    """Lightning's data parallelism over torch's DistributedDataParallel."""

    _target_: str = "pl_pipe.strategies.native.ddp"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    backend: str | None = None
    """`gloo` or `nccl`; null takes gloo on CPU and NCCL on CUDA."""
    timeout_s: float = 1800.0
    """A collective that takes longer is an error."""
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


@dataclass
class FSDPConfig:
    """Lightning's fully sharded data parallelism."""

    _target_: str = "pl_pipe.strategies.native.fsdp"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    timeout_s: float = 1800.0
    sharding_strategy: str = "FULL_SHARD"
    cpu_offload: bool = False


# Lightning is imported inside: composing a configuration must stay quick.


def single() -> str:
    """The trainer's `strategy` for one device; Lightning picks the device itself."""
    return "auto"


def ddp(
    *,
    backend: str | None = None,
    timeout_s: float = 1800.0,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = True,
    static_graph: bool = False,
) -> object:
    from lightning.pytorch.strategies import DDPStrategy

    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"strategy.backend={backend} is unknown; choose gloo, nccl or null")
    return DDPStrategy(
        process_group_backend=backend,
        timeout=timedelta(seconds=timeout_s),
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )


def fsdp(*, timeout_s: float = 1800.0, sharding_strategy: str = "FULL_SHARD", cpu_offload: bool = False) -> object:
    from lightning.pytorch.strategies import FSDPStrategy

    return FSDPStrategy(
        timeout=timedelta(seconds=timeout_s),
        sharding_strategy=sharding_strategy,  # type: ignore[arg-type]
        cpu_offload=cpu_offload,
    )
