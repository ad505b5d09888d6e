"""Writes of variants' numbers into a tensor that they share.

A tensor made in this step becomes an array. One that comes from outside (the batch) or that is a view of another
cannot: its owner would see it change its shape.
"""

from typing import Any

from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays.fallback import REMEDY
from pl_pipe.tensors.arrays.marks import is_copied_view, is_made, mark
from pl_pipe.tensors.operations import user_line


def widen_target(target: Any, name: str, *, width: int, where: str) -> None:
    """The shared tensor becomes, under the same name, an array of equal parts."""
    if not isinstance(target, Tensor):
        return
    if not is_made(target) or target._is_view() or target.requires_grad:
        refuse_target(target, name, where=where)
    target.data = target.detach().expand(width, *target.shape).clone()
    mark(target)


def refuse_target(target: Tensor, name: str, *, where: str) -> None:
    what = "a view of a tensor" if target._is_view() else "a tensor"
    raise FusionError(
        f"{user_line()}{where}: {name} writes the variants' numbers into {what} that they all share; write to a "
        f"copy of it (`.clone()`), make it from a variant's own (`x.new_zeros(…)`), or {REMEDY}"
    )


def refuse_gradient(name: str, *, where: str) -> None:
    raise FusionError(
        f"{user_line()}{where}: {name} of an array would add up the gradients of all variants; call it on each "
        f"variant's output, after the forward, or {REMEDY}"
    )


def refuse_copied_view(target: Any, name: str, *, where: str) -> None:
    if isinstance(target, Tensor) and is_copied_view(target):
        raise FusionError(
            f"{user_line()}{where}: {name} writes through `.view()` of a tensor whose variants do not lie one after "
            f"another, so the tensor itself would not change; use `.reshape()` and its result, or {REMEDY}"
        )
