"""How arrays lie in memory. Strides carry it, so nothing has to be tracked.

    a convolution's output     [N, M·C, H, W]     shown as the view [M, N, C, H, W]
    the next one's input       the same memory, viewed back

Element-wise operations keep strides, so a chain of convolutions and norms never copies.
Legend: M variants, N samples, C channels of one variant.
"""

import torch
from torch import Tensor

from pl_pipe.tensors.arrays.marks import is_array, mark


def as_array(tensor: Tensor, width: int) -> Tensor:
    """The array itself, or a shared tensor seen by every variant (a view)."""
    return tensor if is_array(tensor) else mark(tensor.expand(width, *tensor.shape))


def to_channels(x_MNC: Tensor) -> Tensor:
    """[M, N, C, *] as [N, M·C, *]: a view where the layout allows."""
    y_NMC = x_MNC.transpose(0, 1)
    return y_NMC.flatten(1, 2)


def from_channels(y_NC: Tensor, width: int) -> Tensor:
    """[N, M·C, *] as [M, N, C, *]: always a view."""
    return mark(torch.unflatten(y_NC, 1, (width, y_NC.shape[1] // width)).transpose(0, 1))


def to_samples(x_MN: Tensor) -> Tensor:
    """[M, N, *] as [M·N, *]: a view where the layout allows."""
    return x_MN.flatten(0, 1)


def from_samples(y_N: Tensor, width: int) -> Tensor:
    return mark(torch.unflatten(y_N, 0, (width, y_N.shape[0] // width)))


def lies_by_channels(x_MNC: Tensor) -> bool:
    """Whether `to_channels` is a view: variants lie side by side among the channels."""
    return x_MNC.stride(0) == x_MNC.stride(2) * x_MNC.shape[2]


def lies_by_features(x_MNC: Tensor) -> bool:
    """Whether [M, C, N, *] is what lies in memory, as batched matrix products leave it."""
    return x_MNC.stride(1) < x_MNC.stride(2) and x_MNC.stride(0) == x_MNC.stride(2) * x_MNC.shape[2]
