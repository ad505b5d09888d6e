"""Each variant's own optimizer and schedulers, as its module sees them. configure_optimizers -> *own* -> composite."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from pl_pipe.errors import ConfigError, FusionError
from pl_pipe.strategies.fusion.variant_building import Variant, described, settings_text
from pl_pipe.strategies.fusion.variant_hooks import overrides


def own_optimizers(variant: Variant) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """What its `configure_optimizers` returns, in whatever form: several are for manual optimization."""
    name = type(variant.module).__name__
    try:
        optimizers, configs = _init_optimizers_and_lr_schedulers(variant.module)
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            f"{name}.configure_optimizers returns several optimizers, which are for manual optimization; set "
            "self.automatic_optimization = False and step them in training_step, or use one with parameter groups"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}.configure_optimizers fails for variant {variant.number} ({settings_text(variant.choice)}): "
            f"{described(error)}; choose other values"
        ) from error
    if not optimizers[0].param_groups:
        raise FusionError(f"{name}.configure_optimizers of variant {variant.number} gives no optimizer; return one")
    return optimizers, configs


def names_of(optimizers: Sequence[Optimizer]) -> list[str]:
    """As LearningRateMonitor has them."""
    kinds = [type(one).__name__ for one in optimizers]
    before = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
    return [f"lr-{kind}" + (f"-{count}" if count else "") for kind, count in zip(kinds, before, strict=True)]


def hand_over(variant: Variant, optimizers: Sequence[LightningOptimizer], configs: Sequence[LRSchedulerConfig]) -> None:
    """The variant's module answers with these when it is asked; for Lightning, which steps the schedulers of all, their
    names and monitors become the variant's own."""
    own = [one.optimizer for one in optimizers]
    for config in configs:
        place = next((place for place, one in enumerate(own) if one is config.scheduler.optimizer), 0)
        name = config.name or names_of(own)[place]
        config.name = f"{name}/variant_{variant.number}"
        if config.monitor is not None:
            config.monitor = f"{config.monitor}/variant_{variant.number}"
    vars(variant.module)["optimizers"] = partial(_asked_for, optimizers)
    schedulers = [config.scheduler for config in configs]
    vars(variant.module)["lr_schedulers"] = partial(_answer, _one_or_all(schedulers))


def step_schedulers_as_the_variants_do(
    variants: Sequence[Variant], configs: Sequence[Sequence[LRSchedulerConfig]]
) -> None:
    """Lightning asks the module it knows, the first one, to step every scheduler."""
    speaker = variants[0].module
    if not overrides(speaker, "lr_scheduler_step"):
        return
    owners = {
        id(config.scheduler): variant.module
        for variant, of_one in zip(variants, configs, strict=True)
        for config in of_one
    }

    def step(scheduler: Any, metric: Any) -> None:
        owner = owners[id(scheduler)]
        type(owner).lr_scheduler_step(owner, scheduler, metric)

    vars(speaker)["lr_scheduler_step"] = step


def forget(module: L.LightningModule) -> None:
    """An ordinary module again."""
    for name in ("optimizers", "lr_schedulers", "lr_scheduler_step", "log"):
        vars(module).pop(name, None)


def _asked_for(optimizers: Sequence[LightningOptimizer], use_pl_optimizer: bool = True) -> Any:
    own: list[Any] = list(optimizers) if use_pl_optimizer else [one.optimizer for one in optimizers]
    return own[0] if len(own) == 1 else own


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _one_or_all(schedulers: list[Any]) -> Any:
    if not schedulers:
        return None
    return schedulers[0] if len(schedulers) == 1 else schedulers
