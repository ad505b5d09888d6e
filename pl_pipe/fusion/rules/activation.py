"""Activations with parameters; those without are element-wise and need no rule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array


def _prelu(context: Context, input: Tensor, weight: Tensor) -> Any:  # noqa: A002
    """Each variant's slopes along its channels."""
    if not is_array(weight):
        return mark(torch.prelu(input, weight)) if weight.numel() == 1 else NotImplemented
    x = as_array(input, context.width)
    slopes = weight.flatten(1).to(x.dtype)  # [M, C or 1]; under autocast they follow the input
    between = 1 if x.ndim > 2 else 0
    if slopes.shape[1] > 1 or between:
        shape = (slopes.shape[0], *(1,) * between, slopes.shape[1], *(1,) * (x.ndim - 2 - between))
    else:
        shape = (slopes.shape[0], *(1,) * (x.ndim - 1))
    context.report.note("prelu", "broadcast")
    return mark(torch.where(x > 0, x, x * slopes.view(shape)))


RULES: dict[Any, Callable[..., Any]] = {torch.prelu: _prelu}
