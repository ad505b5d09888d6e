"""What is known of a tensor without its values, and ghosts made from that. *spec* -> values -> step.

A ghost is an ordinary tensor on the meta device: user code may ask for its shape, dtype and strides, and nothing is
stored. A signature is what a call looks like without values: equal signatures have equal specs as results.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_pipe.tensors.ghosts.holders import is_holder

_META = torch.device("meta")
# Compared by value in signatures; the class counts too, because 1 == 1.0 == True.
_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


class TensorSpec(NamedTuple):
    """Shape, strides, dtype, and whether a gradient will come back for it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    @property
    def size_bytes(self) -> int:
        """Of its numbers, one after another."""
        return math.prod(self.shape) * self.dtype.itemsize

    def ghost(self) -> Tensor:
        return torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=_META, requires_grad=self.requires_grad
        )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def scan(tree: Any, tensors: list[Tensor], holders: list[Any] | None = None) -> Any:
    """The structure of a nested value with its tensors taken out (and appended to `tensors`), as a hashable key; so are
    objects that hold tensors, where `holders` are asked for."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return Tensor
    kind = type(tree)
    if kind is tuple or kind is list:
        return (kind, *[scan(item, tensors, holders) for item in tree])
    if isinstance(tree, _PLAIN):
        return (kind, tree)
    if isinstance(tree, Mapping):
        return (kind, *[(key, scan(item, tensors, holders)) for key, item in tree.items()])
    if isinstance(tree, tuple | list):
        return (kind, *[scan(item, tensors, holders) for item in tree])
    if isinstance(tree, slice):
        return (slice, scan(tree.start, tensors), scan(tree.stop, tensors), scan(tree.step, tensors))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return (kind, *[(field.name, scan(getattr(tree, field.name, None), tensors, holders)) for field in fields])
    if holders is not None and is_holder(tree):
        holders.append(tree)
        return kind
    return tree


def hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def once_each(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """For `map_tensors`: a tensor that stands in several places stays one tensor."""
    done: dict[int, tuple[Tensor, Tensor]] = {}

    def changed(tensor: Tensor) -> Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = tensor, change(tensor)
        return done[id(tensor)][1]

    return changed
