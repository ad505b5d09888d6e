"""Clips gradients by the norm of all stages' together, as a single process would."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

_METHOD = "clip_grad_by_norm"
_BY_VALUE = "clip_grad_by_value"


@contextmanager
def clipping_over_stages(plugin: Precision, *, counts: bool) -> Iterator[None]:
    """Within the block, `plugin` clips by the global norm; all ranks must clip at the same points.

    Replicas of a stage have the same gradients, of which only one's must count.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters = [p for p in plugin.main_params(optimizer) if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in parameters if counts else ():
            squares += torch.linalg.vector_norm(parameter.grad).double().cpu() ** 2
        dist.all_reduce(squares)
        if parameters:
            clip_grads_with_norm_(parameters, clip_val, squares.sqrt().float().to(parameters[0].device))

    stored: dict[str, Any] = vars(plugin)
    stored[_METHOD] = clip
    try:
        yield
    finally:
        stored.pop(_METHOD, None)


@contextmanager
def clipping_where_gradients_are(plugin: Precision) -> Iterator[None]:
    """Within the block, a stage without gradients (all its layers are frozen) clips nothing; torch would raise."""
    plain = plugin.clip_grad_by_value

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in plugin.main_params(optimizer)):
            plain(optimizer, clip_val)

    stored: dict[str, Any] = vars(plugin)
    stored[_BY_VALUE] = clip
    try:
        yield
    finally:
        stored.pop(_BY_VALUE, None)
