"""Draws of random numbers as operations that no compiler looks into. layout, the draw before -> *draw* -> numbers.

That one is made after another is all that it takes the other's sign for.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

WHOLE = "random_"
_SEEDED = (torch.Tag.nondeterministic_seeded,)
_ROUND = 16
"""Bytes that are read and written at once, at most."""


def shift_of(tensor: Tensor) -> int:
    """How many of its numbers lie between the last round address and the first of them."""
    return tensor.data_ptr() % _ROUND // tensor.element_size()


@torch.library.custom_op("pl_pipe::dropout", mutates_args=(), tags=_SEEDED)
def _dropout(
    x: Tensor,
    p: float,
    strides: Sequence[int],
    shift: int,
    after: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own for a tensor that lies like this; its result and its mask, and a sign that it was made."""
    if not _lies(x, strides, shift):
        x = _laid_out(x, strides, shift)
    return *torch.native_dropout(x, p, True), _sign(x.device)


@_dropout.register_fake
def _(x: Tensor, p: float, strides: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001
    laid_out = x.new_empty_strided(x.shape, strides)
    return torch.empty_like(laid_out), torch.empty_like(laid_out, dtype=torch.bool), _sign(x.device)


@torch.library.custom_op("pl_pipe::filled", mutates_args=(), tags=_SEEDED)
def _filled(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    how: str,
    numbers: Sequence[float],
    whole: Sequence[int],
    after: Tensor | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """New memory, filled by a method of tensors with these numbers; and a sign."""
    memory = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return getattr(memory, how)(*(whole or numbers)), _sign(device)


@_filled.register_fake
def _(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device), _sign(device)


OPERATIONS = torch.ops.pl_pipe


def _sign(device: torch.device) -> Tensor:
    return torch.empty(1, device=device)


def _lies(x: Tensor, strides: Sequence[int], shift: int) -> bool:
    alike = all(size == 1 or mine == wanted for size, mine, wanted in zip(x.shape, x.stride(), strides, strict=True))
    return alike and shift_of(x) == shift


def _laid_out(x: Tensor, strides: Sequence[int], shift: int) -> Tensor:
    shape = x.shape
    for place, stride in enumerate(strides):
        if stride == 0:  # all along it are one number
            x = x.narrow(place, 0, 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    return x.new_empty(shift + extent).as_strided(x.shape, strides, shift).copy_(x).expand(shape)
