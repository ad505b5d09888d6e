"""Clips gradients by the norm of all stages' together, as a single process would.

gradient_clip_val, self.clip_gradients     by the plugin's method, which is replaced
torch.nn.utils.clip_grad_norm_ in a hook   by the norm that torch's function asks for, which is replaced meanwhile
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.nn.utils import clip_grad, clip_grads_with_norm_
from torch.optim import Optimizer

_METHOD = "clip_grad_by_norm"
_BY_VALUE = "clip_grad_by_value"
_HOOKS = "_after_closure"
_NORM = "_get_total_norm"
_GROUPED = "_group_tensors_by_device_and_dtype"


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

    plain_hooks = plugin._after_closure

    def hooks(*args: Any, **kwargs: Any) -> None:
        with norms_over_stages(counts=counts):
            plain_hooks(*args, **kwargs)

    stored: dict[str, Any] = vars(plugin)
    stored.update({_METHOD: clip, _HOOKS: hooks})
    try:
        yield
    finally:
        for name in (_METHOD, _HOOKS):
            stored.pop(name, None)


@contextmanager
def norms_over_stages(*, counts: bool) -> Iterator[None]:
    """Within the block, torch's `clip_grad_norm_` goes by the gradients of all ranks, each of which must call it."""
    plain = getattr(clip_grad, _NORM)

    def norm(
        tensors: Any, norm_type: float | str = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Any:
        norm_type = float(norm_type)  # which torch takes as a text too
        own: Tensor = plain(tensors, norm_type, foreach=foreach)
        power = 1.0 if norm_type == torch.inf else norm_type
        total = own.double().cpu() ** power if counts else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(total, op=dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM)
        total = (total ** (1 / power)).to(own)
        return plain([total], norm_type, error_if_nonfinite, foreach)  # its own, and torch's words if it is none

    setattr(clip_grad, _NORM, norm)
    try:
        yield
    finally:
        setattr(clip_grad, _NORM, plain)


@contextmanager
def clipping_where_gradients_are(plugin: Precision) -> Iterator[None]:
    """Within the block, a stage that has none of the gradients (its layers are frozen, or others) clips nothing, by
    the plugin or by torch's functions, which would raise."""
    plain, grouped = plugin.clip_grad_by_value, getattr(clip_grad, _GROUPED)

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in plugin.main_params(optimizer)):
            plain(optimizer, clip_val)

    stored: dict[str, Any] = vars(plugin)
    stored[_BY_VALUE] = clip
    setattr(clip_grad, _GROUPED, lambda lists: grouped(lists) if lists[0] else {})
    try:
        yield
    finally:
        stored.pop(_BY_VALUE, None)
        setattr(clip_grad, _GROUPED, grouped)
