"""Convolutions of M variants.

    grouped          one convolution with M times the groups (HFTA, MLSys'21)
    shared input     the batch itself, which all variants see: one plain convolution with M·O outputs
    batched matmul   a 1×1 kernel is a matrix product for each position
    branches         one convolution a variant

Legend: M variants, N samples, C/O channels of one variant in and out, P positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pl_pipe.fusion.context import Context
from pl_pipe.fusion.formulations import BATCHED, BRANCHES, GROUPED, SHARED_INPUT, Formulation
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.layout import as_array, from_channels, to_channels


@dataclass(slots=True)
class Convolution:
    function: Callable[..., Tensor]
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    output_padding: Any
    width: int
    transposed: bool

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        if self.transposed:
            return self.function(x, weight, bias, self.stride, self.padding, self.output_padding, groups, self.dilation)
        return self.function(x, weight, bias, self.stride, self.padding, self.dilation, groups)

    @property
    def spatial(self) -> int:
        return self.weight.ndim - 3


def _grouped(call: Convolution) -> Tensor:
    if is_array(call.x):
        x_NC = to_channels(call.x)
    else:
        x_NC = call.x.repeat(1, call.width, *(1,) * call.spatial)
    return from_channels(
        call.compute(x_NC, call.weight.flatten(0, 1), _flat(call.bias), call.groups * call.width), call.width
    )


def _shared_input(call: Convolution) -> Tensor:
    if not call.transposed:
        return from_channels(call.compute(call.x, call.weight.flatten(0, 1), _flat(call.bias), 1), call.width)
    weight_CO = call.weight.transpose(0, 1).flatten(1, 2)  # transposed kernels lead with their inputs
    return from_channels(call.compute(call.x, weight_CO, _flat(call.bias), 1), call.width)


def _matmul(call: Convolution) -> Tensor:
    x_MNC = call.x
    for dim, step in enumerate(_each(call.stride, call.spatial)):
        if step != 1:
            x_MNC = x_MNC[(slice(None),) * (3 + dim) + (slice(None, None, step),)]
    x_MCN = x_MNC.transpose(1, 2)
    weight_MOC = call.weight.flatten(2)
    if call.bias is None:
        y_MOP = torch.bmm(weight_MOC, x_MCN.flatten(2))
    else:
        y_MOP = torch.baddbmm(call.bias.unsqueeze(2), weight_MOC, x_MCN.flatten(2))
    return mark(torch.unflatten(y_MOP, 2, x_MCN.shape[2:]).transpose(1, 2))


def _branches(call: Convolution) -> Tensor:
    inputs = call.x.unbind(0) if is_array(call.x) else [call.x] * call.width
    biases = [None] * call.width if call.bias is None else call.bias.unbind(0)
    outs = [
        call.compute(x, weight, bias, call.groups)
        for x, weight, bias in zip(inputs, call.weight.unbind(0), biases, strict=True)
    ]
    return from_channels(torch.cat(outs, dim=1), call.width)  # side by side, as the next layer wants them


def _is_pointwise(call: Convolution) -> bool:
    return (
        is_array(call.x)
        and not call.transposed
        and call.groups == 1
        and all(size == 1 for size in call.weight.shape[3:])
        and (call.padding in ("same", "valid") or all(size == 0 for size in _each(call.padding, call.spatial)))
    )


FORMULATIONS = (
    Formulation[Convolution](SHARED_INPUT, _shared_input, lambda call: not is_array(call.x) and call.groups == 1),
    Formulation[Convolution](GROUPED, _grouped),
    Formulation[Convolution](BATCHED, _matmul, _is_pointwise),
    Formulation[Convolution](BRANCHES, _branches),
)


def _convolution(
    function: Callable[..., Tensor],
    context: Context,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    call = Convolution(
        function, input, weight, bias, stride, padding, dilation, groups, 0, context.width, transposed=False
    )
    return _computed(context, call)


def _transposed(
    function: Callable[..., Tensor],
    context: Context,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    call = Convolution(
        function, input, weight, bias, stride, padding, dilation, groups, output_padding, context.width, transposed=True
    )
    return _computed(context, call)


def _computed(context: Context, call: Convolution) -> Any:
    if call.width == 0:
        return NotImplemented
    call.weight = as_array(call.weight, call.width)
    if call.bias is not None:
        call.bias = as_array(call.bias, call.width)
    seen = call.x.ndim - is_array(call.x)
    alone = seen == call.spatial + 1  # one sample without a batch
    if alone:
        call.x = mark(call.x.unsqueeze(1)) if is_array(call.x) else call.x.unsqueeze(0)
    elif seen != call.spatial + 2:
        return NotImplemented
    settings = (call.stride, call.padding, call.dilation, call.groups, call.output_padding, is_array(call.x))
    out = context.formulate(call.function.__name__, call, FORMULATIONS, (call.x, call.weight), settings)
    return mark(out.squeeze(1)) if alone else out


def _flat(bias_MO: Tensor | None) -> Tensor | None:
    return None if bias_MO is None else bias_MO.flatten()


def _each(value: Any, spatial: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * spatial
    given = tuple(value)
    return given * spatial if len(given) == 1 else given


RULES: dict[Any, Callable[..., Any]] = {
    **{function: partial(_convolution, function) for function in (torch.conv1d, torch.conv2d, torch.conv3d)},
    **{
        function: partial(_transposed, function)
        for function in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    },
}
