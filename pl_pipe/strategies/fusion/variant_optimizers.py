"""Each variant's own optimizer and schedulers, as its module sees them. configure_optimizers -> *own* -> composite."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from pl_pipe.errors import ConfigError, FusionError
from pl_pipe.strategies.fusion.variant_building import Variant, described, settings_text
from pl_pipe.strategies.fusion.variant_hooks import overrides


def own_optimizer(variant: Variant) -> tuple[Optimizer, list[LRSchedulerConfig]]:
    """What its `configure_optimizers` returns, in whatever form with one optimizer."""
    name = type(variant.module).__name__
    try:
        optimizers, configs = _init_optimizers_and_lr_schedulers(variant.module)
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            f"{name}.configure_optimizers returns several optimizers; fused variants train with one each: use its "
            "parameter groups for several learning rates, or train with strategy=single"
        ) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}.configure_optimizers fails for variant {variant.number} ({settings_text(variant.choice)}): "
            f"{described(error)}; choose other values"
        ) from error
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the step several times for one update, which fused variants cannot; choose another "
            "optimizer, or train with strategy=single"
        )
    if not optimizers[0].param_groups:
        raise FusionError(f"{name}.configure_optimizers of variant {variant.number} gives no optimizer; return one")
    return optimizers[0], configs


def hand_over(variant: Variant, optimizer: Optimizer, configs: Sequence[LRSchedulerConfig]) -> None:
    """The variant's module answers with these when it is asked; for Lightning, which steps the schedulers of all, their
    names and monitors become the variant's own."""
    for config in configs:
        name = config.name or f"lr-{type(optimizer).__name__}"
        config.name = f"{name}/variant_{variant.number}"
        if config.monitor is not None:
            config.monitor = f"{config.monitor}/variant_{variant.number}"
    vars(variant.module)["optimizers"] = partial(_asked_for, optimizer, variant.module)
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


def _asked_for(optimizer: Optimizer, module: L.LightningModule, use_pl_optimizer: bool = True) -> Any:
    if not use_pl_optimizer:
        return optimizer
    return LightningOptimizer._to_lightning_optimizer(optimizer, module.trainer.strategy)


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _one_or_all(schedulers: list[Any]) -> Any:
    if not schedulers:
        return None
    return schedulers[0] if len(schedulers) == 1 else schedulers
