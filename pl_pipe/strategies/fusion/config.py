"""The configuration of `strategy=fusion`."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class FusionConfig:
    """Variants of a model, trained as one array."""

    _target_: str = "pl_pipe.strategies.fusion.config.fusion"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    variants: Any = None
    """Values for each name: `strategy.variants.lr=[0.1,0.03]`; or a list, `strategy.variants=[{lr:0.1},{lr:0.03}]`.
    Names are the model's hyper-parameters, `seed` and `batch_size`."""
    combine: str = "grid"
    """`grid` for all combinations of the values, `zip` for the first of each, the second of each, …"""
    trials: str | None = None
    """A CSV or JSON file of variants, instead."""
    factory: str | None = None
    """A function that builds a variant, `my_package.build`; null calls the model's class."""
    max_array: Any = "auto"
    """The most variants to train at once; `auto` for as many as memory holds."""
    fuse_except: list[str] = field(default_factory=list)
    """Modules (also patterns) that run once a variant."""
    formulation: str = "auto"
    """`array`, `model array`, `one by one`, `branches`, `captured array`, `compiled branches`, `compiled array`;
    `auto` times them during the first steps."""
    compile: Any = "auto"
    """Whether `auto` tries compiled steps on a GPU: `true`, `false`, `tuned` for kernels that are tuned, which takes
    longer, or `auto` where the training is long enough."""
    layers: str = "auto"
    """How an array's layers are computed: `timed` for the quickest by measurement, `usual`; `auto` times on a GPU,
    but for steps that are compiled."""
    seeds: list[int] | None = None
    """One for each variant; null gives all the run's. Without variants, the model as it is, once a seed."""
    monitor: str | None = "${monitor}"
    """The metric of the leaderboard."""
    mode: str | None = "${monitor_mode}"
    devices: Any = "${trainer.devices}"
    """With several, each has the whole array and a share of every batch."""
    folder: str | None = None
    """Where variants.csv, curves and checkpoints are put; null is the run's folder."""


def fusion(*, devices: Any = 1, monitor: str | None = None, mode: str | None = None, **settings: Any) -> object:
    from pl_pipe.strategies.fusion.ddp import FusionDDPStrategy
    from pl_pipe.strategies.fusion.strategy import FusionStrategy  # composing a configuration must stay quick

    several = len(devices) > 1 if isinstance(devices, list) else str(devices).isdigit() and int(devices) > 1
    strategy = FusionDDPStrategy if several else FusionStrategy
    return strategy(monitor=monitor, mode=mode if monitor else None, **settings)
