"""Optimizers and learning-rate policies that the original systems trained with.

PipeDream's image recipes use SGD with a linear warm-up of 5 epochs and then one of three decays, each a function of the
whole epoch e of E: step `gamma ** (e // n)`, polynomial `(1 - e/E) ** power`, exponential `gamma ** (e/E)`. HFTA's use
Adam and Adadelta.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from torch import nn

from pl_pipe.errors import ConfigError

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adadelta": torch.optim.Adadelta,
}
LR_POLICIES = ("constant", "step", "polynomial", "exponential")


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer called `name`; `momentum` is SGD's alone."""
    if name not in OPTIMIZERS:
        raise ConfigError(f"recipe.optimizer={name} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    extra = {"momentum": momentum} if name == "sgd" else {}
    return OPTIMIZERS[name](parameters, lr=lr, weight_decay=weight_decay, **extra)


def lr_factor(
    step: int,
    *,
    policy: str,
    steps_per_epoch: int,
    epochs: float,
    warmup_epochs: float,
    gamma: float,
    step_epochs: int,
    power: float,
) -> float:
    """What the base learning rate is multiplied by at optimizer step `step` (counted from 0).

    During warm-up it rises linearly and reaches 1 at the last warm-up step; then the policy applies, constant within
    an epoch. Past the last epoch (a resumed run with a smaller `max_epochs`) the last epoch's value stays.
    """
    warmup_steps = warmup_epochs * steps_per_epoch
    if step < warmup_steps:
        return min(1.0, (step + 1) / warmup_steps)
    epoch = last_or_earlier(step // steps_per_epoch, epochs)
    if policy == "constant":
        return 1.0
    if policy == "step":
        return float(gamma ** (epoch // step_epochs))
    if policy == "polynomial":
        return polynomial_lr_factor(epoch, epochs=epochs, power=power)
    if policy == "exponential":
        return float(gamma ** (epoch / epochs))
    raise ConfigError(f"recipe.lr_policy={policy} is unknown; choose one of {', '.join(LR_POLICIES)}")


def polynomial_lr_factor(epoch: int, *, epochs: float, power: float) -> float:
    """What the base rate is multiplied by in whole epoch `epoch`."""
    return float((1.0 - last_or_earlier(epoch, epochs) / epochs) ** power)


def last_or_earlier(epoch: int, epochs: float) -> int:
    return min(epoch, max(math.ceil(epochs) - 1, 0))


def training_length(trainer: L.Trainer) -> tuple[int, float]:
    """Optimizer steps an epoch, and epochs in the whole run."""
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    if math.isinf(steps) or math.isinf(batches):
        raise ConfigError(
            "the learning-rate policy needs to know how long training lasts; set trainer.max_epochs "
            "(and trainer.limit_train_batches where the data set has no length)"
        )
    steps_per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    return steps_per_epoch, steps / steps_per_epoch


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, steps_per_epoch: int, epochs: float, **policy: Any
) -> torch.optim.lr_scheduler.LambdaLR:
    """A per-step scheduler over `lr_factor`; `policy` holds its remaining arguments."""

    def factor(step: int) -> float:
        return lr_factor(step, steps_per_epoch=steps_per_epoch, epochs=epochs, **policy)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
