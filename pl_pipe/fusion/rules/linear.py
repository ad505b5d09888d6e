"""Linear layers of M variants: a batched matrix product, or one product where all see the same input.

Legend: M variants, N rows, I/O features in and out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import BATCHED, BRANCHES, SHARED_INPUT, Formulation
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array


@dataclass(slots=True)
class Linear:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    width: int


def _shared_input(call: Linear) -> Tensor:
    bias = None if call.bias is None else call.bias.flatten()
    y = F.linear(call.x, call.weight.flatten(0, 1), bias)  # […, M·O]
    return mark(torch.unflatten(y, -1, (call.width, call.weight.shape[1])).movedim(-2, 0))


def _batched(call: Linear) -> Tensor:
    x_MI = as_array(call.x, call.width)
    lead = x_MI.shape[1:-1]
    x_MNI = x_MI.unsqueeze(1) if not lead else x_MI.flatten(1, -2)
    if call.bias is None:
        y_MNO = torch.bmm(x_MNI, call.weight.mT)
    else:
        y_MNO = torch.baddbmm(call.bias.unsqueeze(1), x_MNI, call.weight.mT)
    return mark(y_MNO.view(call.width, *lead, y_MNO.shape[-1]))


def _branches(call: Linear) -> Tensor:
    inputs = call.x.unbind(0) if is_array(call.x) else [call.x] * call.width
    biases = [None] * call.width if call.bias is None else call.bias.unbind(0)
    outs = [F.linear(x, w, b) for x, w, b in zip(inputs, call.weight.unbind(0), biases, strict=True)]
    return mark(torch.stack(outs))


FORMULATIONS = (
    Formulation[Linear](SHARED_INPUT, _shared_input, lambda call: not is_array(call.x)),
    Formulation[Linear](BATCHED, _batched),
    Formulation[Linear](BRANCHES, _branches),
)


def _linear(context: Context, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:  # noqa: A002
    if not is_array(weight) and (bias is None or not is_array(bias)):
        return mark(F.linear(input, weight, bias))
    weight = as_array(weight, context.width)
    if weight.ndim != 3:
        return NotImplemented
    call = Linear(input, weight, None if bias is None else as_array(bias, context.width), context.width)
    return context.formulate("linear", call, FORMULATIONS, (input, weight), (is_array(input), bias is None))


RULES: dict[Any, Callable[..., Any]] = {F.linear: _linear}
