"""The settings of an optimizer that schedulers change, kept with the batch they were meant for.

In a pipeline an update comes later than its batch: after further batches have entered, and after the scheduler has gone
on. It must use the learning rate of its own batch, or the stages would follow different schedules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")  # others may be the optimizer's own counters

Settings: TypeAlias = list[dict[str, Any]]
"""One entry for each parameter group."""


def settings_of(optimizer: Optimizer) -> Settings:
    return [{name: _kept(group[name]) for name in _SCHEDULED if name in group} for group in optimizer.param_groups]


def named_settings(optimizer: Optimizer) -> dict[str, Any]:
    """The same as plain numbers: `lr of parameter group 0`."""
    return {
        f"{name} of parameter group {number}": value.tolist() if isinstance(value, Tensor) else value
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name in _SCHEDULED
    }


@contextmanager
def with_settings(optimizer: Optimizer, settings: Settings) -> Iterator[None]:
    """The optimizer has these settings within the block, and its own again afterwards.

    One that the block changes (a hook before the update, the optimizer itself) stays as the block leaves it.
    """
    now = settings_of(optimizer)
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update({name: _kept(value) for name, value in values.items()})
    try:
        yield
    finally:
        for group, values, own in zip(optimizer.param_groups, settings, now, strict=True):
            group.update({name: own[name] for name, value in values.items() if _same(group[name], value)})


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
