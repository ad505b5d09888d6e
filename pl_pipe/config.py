"""The whole configuration of a run, typed. Hydra composes it from `conf/`; the command line builds objects from it.

Each part's dataclass stands beside its owner; this file has the root and Lightning's Trainer, which have no other home.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from pl_pipe import planning_config
from pl_pipe.cluster import ClusterConfig, Launch
from pl_pipe.strategies import native
from pl_pipe.strategies.adaptive_config import AdaptiveConfig
from pl_pipe.strategies.auto_config import AutoConfig
from pl_pipe.strategies.fusion.config import FusionConfig
from pl_pipe.strategies.pipeline.pipedream_config import PipeDreamConfig
from pl_pipe.strategies.uneven.config import (
    ADPSGDConfig,
    DataParallelConfig,
    HetPipeConfig,
    PartialReduceConfig,
    SDPipeConfig,
)


@dataclass
class TrainerConfig:
    """Lightning's Trainer, argument by argument, except those with a group of their own (strategy, logger …)."""

    accelerator: str = "auto"
    devices: Any = 1
    """A number, a list of indices, or `auto`. Under torchrun and SLURM: what they started."""
    num_nodes: int = 1
    precision: str | None = None
    fast_dev_run: Any = False
    max_epochs: int | None = 14
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | None = None
    """`DD:HH:MM:SS`"""
    limit_train_batches: Any = None
    limit_val_batches: Any = None
    limit_test_batches: Any = None
    limit_predict_batches: Any = None
    overfit_batches: Any = 0.0
    val_check_interval: Any = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = 0
    log_every_n_steps: int | None = 10
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: Any = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    profiler: str | None = None
    detect_anomaly: bool = False
    barebones: bool = False
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0


@dataclass
class PredictConfig:
    """What `pl-pipe predict` writes."""

    format: str = "pt"
    """`pt` for any outputs, `csv` for one row a sample."""


@dataclass
class ProfilingConfig:
    """How `pl-pipe profile` measures."""

    repeats: int = 20
    """Timed passes; the medians count."""
    warmup: int = 3
    load_batches: int = 10
    """Batches fetched to time the data loader."""


@dataclass
class RunConfig:
    """The root. `recipe`, `data`, `logger` and `callbacks` are open, so that users' own classes fit in."""

    recipe: Any = MISSING
    data: Any = MISSING
    strategy: Any = MISSING
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    hetero: Any = MISSING
    policy: Any = MISSING
    logger: Any = MISSING
    callbacks: Any = MISSING
    evaluation: Any = MISSING
    predict: PredictConfig = field(default_factory=PredictConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    seed: int = 1
    monitor: str | None = None
    """Logged metric by which the best checkpoint is chosen; recipes set their own, null is `val_loss` if logged."""
    monitor_mode: str = "min"
    ckpt_path: str | None = None
    """`last`, `best` or a file: where to go on from (fit), what to evaluate (validate, test, predict).
    `pl-pipe evaluate` takes a directory too, and then all checkpoints in it."""
    trust_checkpoint: bool = False
    """Load checkpoints that hold Python objects beyond tensors and plain values; such a file can run code."""
    out: str | None = None
    """Folder for what `pl-pipe evaluate` writes; null is `evaluation` in the run's directory."""
    output_root: str = "outputs"


@dataclass
class ProbeConfig:
    """What `pl-pipe probe` writes."""

    out: str = "cluster.json"
    pair_budget_s: float = 2.0
    """What one pair of ranks may take; on slow links the largest messages are then left out."""
    timeout_s: float = 30.0
    """The longest time without any progress."""


@dataclass
class ProbeRoot:
    """The root of `pl-pipe probe`: as many ranks as the trainer would have."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)


@dataclass
class DataPlace:
    """Where data is to lie."""

    root: str | None = None


@dataclass
class PrepareRoot:
    """The root of `pl-pipe data prepare`: a data set's preparation, from the group `prepare`."""

    prepare: Any = MISSING
    data: DataPlace = field(default_factory=DataPlace)


def register_configs() -> None:
    """Makes the library's schemas known to Hydra; calling it again changes nothing."""
    store = ConfigStore.instance()
    store.store(group="schema", name="run", node=RunConfig, package="_global_")
    for name, root in planning_config.ROOTS.items():
        store.store(group="schema", name=name, node=root, package="_global_")
    store.store(group="schema", name="probe", node=ProbeRoot, package="_global_")
    store.store(group="schema", name="prepare", node=PrepareRoot, package="_global_")
    strategies = {
        "single": native.SingleConfig,
        "ddp": native.DDPConfig,
        "fsdp": native.FSDPConfig,
        "pipedream": PipeDreamConfig,
        "auto": AutoConfig,
        "fusion": FusionConfig,
        "partial_reduce": PartialReduceConfig,
        "sdpipe": SDPipeConfig,
        "ad_psgd": ADPSGDConfig,
        "hetpipe": HetPipeConfig,
        "data_parallel": DataParallelConfig,
        "adaptive": AdaptiveConfig,
    }
    for name, node in strategies.items():
        store.store(group="schema/strategy", name=name, node=node, package="strategy")


def register_resolvers(launch: Launch | None) -> None:
    """`${launched:devices,1}` is what an outside launcher started, or the second argument where there is none."""
    started: Mapping[str, int] = (
        {} if launch is None else {"devices": launch.local_world_size, "num_nodes": launch.num_nodes}
    )

    def launched(what: str, otherwise: int) -> int:
        return started.get(what, otherwise)

    OmegaConf.register_new_resolver("launched", launched, replace=True)
