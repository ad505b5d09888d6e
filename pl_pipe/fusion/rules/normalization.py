"""Norms of M variants: statistics never mix channels of different variants, so M·C channels are M times C.

Legend: M variants, N samples, C channels of one variant.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import GROUPED
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array, from_channels, lies_by_features, to_channels

AFTERWARDS = "scaled afterwards"


def _batch_norm(
    context: Context,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x_MNC = as_array(input, context.width)
    mean, var, scale, offset = (_channels(one, context.width) for one in (running_mean, running_var, weight, bias))
    context.report.note("batch_norm", GROUPED)
    if lies_by_features(x_MNC):  # [M, C, N, …] in memory: one long sample
        x_MCN = x_MNC.transpose(1, 2)
        y = F.batch_norm(x_MCN.flatten(2).flatten(0, 1).unsqueeze(0), mean, var, scale, offset, training, momentum, eps)
        return mark(y.view(x_MCN.shape).transpose(1, 2))
    y_NC = F.batch_norm(to_channels(x_MNC), mean, var, scale, offset, training, momentum, eps)
    return from_channels(y_NC, context.width)


def _instance_norm(
    context: Context,
    input: Tensor,  # noqa: A002
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    x_MNC = as_array(input, context.width)
    if x_MNC.ndim < 4:
        return NotImplemented
    mean, var, scale, offset = (_channels(one, context.width) for one in (running_mean, running_var, weight, bias))
    context.report.note("instance_norm", GROUPED)
    y_NC = F.instance_norm(to_channels(x_MNC), mean, var, scale, offset, use_input_stats, momentum, eps)
    return from_channels(y_NC, context.width)


def _group_norm(
    context: Context,
    input: Tensor,  # noqa: A002
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    x_MNC = as_array(input, context.width)
    if x_MNC.ndim < 3:
        return NotImplemented
    scale, offset = (_channels(tensor, context.width) for tensor in (weight, bias))
    context.report.note("group_norm", GROUPED)
    y_NC = F.group_norm(to_channels(x_MNC), num_groups * context.width, scale, offset, eps)
    return from_channels(y_NC, context.width)


def _layer_norm(
    context: Context,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    y = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scaled(context, "layer_norm", input, y, normalized_shape, weight, bias)


def _rms_norm(
    context: Context,
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    return _scaled(
        context, "rms_norm", input, F.rms_norm(input, normalized_shape, None, eps), normalized_shape, weight, None
    )


def _scaled(
    context: Context,
    operation: str,
    x: Tensor,
    y: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The variants' own scale and offset, in the precision in which one variant alone would give its result."""
    context.report.note(operation, AFTERWARDS)
    dtype = y.dtype
    ones = y.ndim - is_array(x) - len(normalized_shape)
    for tensor, apply in ((weight, _times), (bias, _plus)):
        if tensor is not None:
            per_variant = is_array(tensor)
            shape = (tensor.shape[0], *(1,) * ones, *normalized_shape) if per_variant else tensor.shape
            y = apply(y, tensor.view(shape))
    y = y.to(dtype)
    return mark(y)


def _times(y: Tensor, factor: Tensor) -> Tensor:
    return y * factor


def _plus(y: Tensor, offset: Tensor) -> Tensor:
    return y + offset


def _channels(tensor: Tensor | None, width: int) -> Tensor | None:
    """[M, C] as [M·C], in place: running statistics are updated through it."""
    if tensor is None:
        return None
    return tensor.flatten() if is_array(tensor) else tensor.repeat(width)


RULES: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
}
