"""Cross entropy of M variants: one call over M·N samples, then each variant's own mean.

Legend: M variants, N samples, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import BRANCHES, Formulation
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array, from_samples, to_samples

FOLDED = "one batch"


@dataclass(slots=True)
class CrossEntropy:
    context: Context
    scores: Tensor
    target: Tensor
    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


def _folded(call: CrossEntropy) -> Tensor:
    width = call.context.width
    target = as_array(call.target, width)
    losses = F.cross_entropy(
        to_samples(as_array(call.scores, width)),
        to_samples(target),
        ignore_index=call.ignore_index,
        reduction="none",
        label_smoothing=call.label_smoothing,
    )
    losses_MN = from_samples(losses, width)
    if call.reduction == "none":
        return losses_MN
    sums_M = losses_MN.flatten(1).sum(1)
    if call.reduction == "sum":
        return mark(sums_M)
    if target.is_floating_point():
        return mark(sums_M / losses_MN[0].numel())
    return mark(sums_M / (target != call.ignore_index).flatten(1).sum(1))


def _branches(call: CrossEntropy) -> Any:
    settings = {
        "ignore_index": call.ignore_index, "reduction": call.reduction, "label_smoothing": call.label_smoothing,
    }  # fmt: skip
    args = (call.scores, call.target, call.weight)
    return call.context.per_variant(F.cross_entropy, args, settings, name="cross_entropy")


FORMULATIONS = (
    Formulation[CrossEntropy](
        FOLDED, _folded, lambda call: call.weight is None and call.scores.ndim - is_array(call.scores) > 1
    ),
    Formulation[CrossEntropy](BRANCHES, _branches),
)


def _cross_entropy(
    context: Context,
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        return NotImplemented
    call = CrossEntropy(context, input, target, weight, ignore_index, reduction, label_smoothing)
    return context.formulate("cross_entropy", call, FORMULATIONS, (input, target), (reduction,))


RULES: dict[Any, Callable[..., Any]] = {F.cross_entropy: _cross_entropy}
