"""Dropout: every variant has its own mask, and may have its own probability.

elements          dropout
whole channels    dropout1d/2d/3d
alpha             keeps mean and variance of a self-normalizing network (Klambauer, NeurIPS'17)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array
from pl_pipe.tensors.arrays.writes import refuse_copied_view, widen_target

OWN_MASKS = "own masks"
_ALPHA = 1.7580993408473766  # of SELU: scale times alpha


@dataclass(frozen=True)
class Kind:
    """One of torch's dropouts; `unbatched` is the rank at which it sees one sample, whose channels come first."""

    function: Callable[..., Tensor]
    whole_channels: bool = False
    alpha: bool = False
    unbatched: int | None = None
    drops_unasked: bool = True
    """Whether it drops when nobody says that this is training."""


KINDS = {
    kind.function.__name__: kind
    for kind in (
        Kind(F.dropout),
        Kind(F.dropout1d, whole_channels=True, unbatched=2),
        Kind(F.dropout2d, whole_channels=True),
        Kind(F.dropout3d, whole_channels=True, unbatched=4),
        Kind(F.alpha_dropout, alpha=True, drops_unasked=False),
        Kind(F.feature_alpha_dropout, whole_channels=True, alpha=True, drops_unasked=False),
    )
}


def dropped(context: Context, kind: Kind, x: Tensor, probabilities: Sequence[float], *, in_place: bool) -> Tensor:
    """The array with `probabilities[j]` of variant j's elements or channels dropped."""
    name = kind.function.__name__
    if any(not 0.0 <= p <= 1.0 for p in probabilities):
        return kind.function(x, p=next(p for p in probabilities if not 0.0 <= p <= 1.0))  # torch tells
    if in_place and not is_array(x):
        widen_target(x, name, width=context.width, layer=context.report.part)
    x = as_array(x, context.width)
    if in_place:
        refuse_copied_view(x, name, layer=context.report.part)
    context.report.note(name, OWN_MASKS)
    if context.streams.own:
        return _in_turns(context, kind, x, probabilities, in_place=in_place)
    if kind.function is F.dropout and len(set(probabilities)) == 1:
        return mark(F.dropout(x, probabilities[0], True, in_place))
    factor, offset = _noise(kind, x, probabilities)
    if in_place:
        x.mul_(factor)
        return x if offset is None else x.add_(offset)
    return mark(x * factor if offset is None else x * factor + offset)


def _in_turns(context: Context, kind: Kind, x: Tensor, probabilities: Sequence[float], *, in_place: bool) -> Tensor:
    """As each variant would alone, with numbers of its own stream."""
    outs = []
    for variant, (part, p) in enumerate(zip(x.unbind(0), probabilities, strict=True)):
        with context.streams.turn(variant):
            outs.append(kind.function(part, p, True))
    return x.copy_(torch.stack(outs)) if in_place else mark(torch.stack(outs))


def _noise(kind: Kind, x: Tensor, probabilities: Sequence[float]) -> tuple[Tensor, Tensor | None]:
    """What the array is multiplied by, and what is added to it."""
    shape = list(x.shape)
    if kind.whole_channels:
        first = 2 if x.ndim - 1 == kind.unbatched else 3  # [M, C, …] or [M, N, C, …]
        shape[first:] = [1] * len(shape[first:])
    column = (len(probabilities), *(1,) * (x.ndim - 1))
    kept = x.new_tensor([1.0 - p for p in probabilities]).view(column)
    mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(kept.expand(shape))
    if not kind.alpha:
        return mask.mul_(torch.where(kept > 0, 1.0 / kept, 0.0)), None
    scale = x.new_tensor([_alpha_scale(p) for p in probabilities]).view(column)
    lost = x.new_tensor([_ALPHA * _alpha_scale(p) * p for p in probabilities]).view(column)
    offset = (mask - 1) * (_ALPHA * scale) + lost
    return mask * scale, offset


def _alpha_scale(p: float) -> float:
    return 0.0 if p == 1.0 else 1.0 / sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))


def _functional(
    kind: Kind,
    context: Context,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
) -> Any:
    training = kind.drops_unasked if training is None else training
    if not training or p == 0.0:
        out = kind.function(input, p, training, inplace)
        return mark(out) if is_array(input) else out
    return dropped(context, kind, input, [p] * context.width, in_place=inplace)


RULES: dict[Any, Callable[..., Any]] = {kind.function: partial(_functional, kind) for kind in KINDS.values()}
