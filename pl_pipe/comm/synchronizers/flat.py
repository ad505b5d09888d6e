"""Many tensors as one stretch of numbers on the host. parameters -> *FlatTensors* -> messages."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class FlatTensors:
    """Floating-point tensors (a complex one as pairs of them) in a fixed order; the stretch has the widest type among
    them, float32 at least."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        real = [torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor for tensor in tensors]
        self.tensors = [tensor for tensor in real if tensor.is_floating_point()]
        self.dtype = torch.float32
        for tensor in self.tensors:
            self.dtype = torch.promote_types(self.dtype, tensor.dtype)
        self.numel = sum(tensor.numel() for tensor in self.tensors)

    def empty(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype)

    @torch.no_grad()
    def read(self, into: Tensor | None = None) -> Tensor:
        flat = self.empty() if into is None else into
        for tensor, part in self._parts(flat):
            part.copy_(tensor)
        return flat

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        for tensor, part in self._parts(flat):
            tensor.copy_(part)

    def _parts(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for tensor in self.tensors:
            yield tensor, flat[start : start + tensor.numel()].view(tensor.shape)
            start += tensor.numel()
