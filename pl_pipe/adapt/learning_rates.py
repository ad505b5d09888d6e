"""Learning rates times a factor, from now on. ResizeBatch -> *learning rates* -> optimizers, schedules.

A schedule computes rates from what it has noted in the beginning, in itself, in the schedules that it is made of, or
in the optimizer's groups; all of that is multiplied, so that the next rate is the factor times what it would have been.
"""

from typing import Any

import lightning as L

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
"""The last two are OneCycleLR's."""
_OF_SCHEDULES = ("base_lrs", "max_lrs", "_last_lr")


def scale_rates(trainer: L.Trainer, factor: float) -> None:
    """Of all optimizers."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            for name in _OF_GROUPS:
                if name in group:
                    group[name] = group[name] * factor
    for config in trainer.lr_scheduler_configs:
        _scale_schedule(config.scheduler, factor)


def _scale_schedule(schedule: Any, factor: float) -> None:
    for name in _OF_SCHEDULES:
        if hasattr(schedule, name):
            setattr(schedule, name, [rate * factor for rate in getattr(schedule, name)])
    for part in getattr(schedule, "_schedulers", ()):  # of SequentialLR and ChainedScheduler
        _scale_schedule(part, factor)
