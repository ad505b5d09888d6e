"""Writes of variants' numbers into a tensor that they share.

A tensor made in this step becomes an array. One that comes from outside (the batch) or that is a view of another
cannot: its owner would see it change its shape.
"""

from typing import Any

from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays.marks import is_copied_view, is_made, mark
from pl_pipe.tensors.arrays.messages import Layer, place, remedy


def widen_target(target: Any, name: str, *, width: int, layer: Layer) -> None:
    """The shared tensor becomes, under the same name, an array of equal parts."""
    if not isinstance(target, Tensor):
        return
    if not is_made(target) or target._is_view() or target.requires_grad:
        refuse_target(target, name, layer=layer)
    target.data = target.detach().expand(width, *target.shape).clone()
    mark(target)


def refuse_target(target: Tensor, name: str, *, layer: Layer) -> None:
    what = "a view of a tensor" if target._is_view() else "a tensor"
    raise FusionError(
        f"{place(layer)}: {name} writes the variants' numbers into {what} that they all share; write to a "
        f"copy of it (`.clone()`), make it from a variant's own (`x.new_zeros(…)`), or {remedy(layer)}"
    )


def refuse_gradient(name: str, *, layer: Layer) -> None:
    raise FusionError(
        f"{place(layer)}: {name} of an array would add up the gradients of all variants; call it on each "
        f"variant's output, after the forward, or {remedy(layer)}"
    )


def refuse_copied_view(target: Any, name: str, *, layer: Layer) -> None:
    if isinstance(target, Tensor) and is_copied_view(target):
        raise FusionError(
            f"{place(layer)}: {name} writes through `.view()` of a tensor whose variants do not lie one after "
            f"another, so the tensor itself would not change; use `.reshape()` and its result, or {remedy(layer)}"
        )
