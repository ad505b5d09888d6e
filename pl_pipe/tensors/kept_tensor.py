"""A tensor as it was, to be compared with and to be put back. tensor -> *kept* -> tensor."""

from typing import Any

import torch
from torch import Tensor

from pl_pipe.tensors.lineage import is_strided, version


class KeptTensor:
    """Its numbers, and how they lie in memory: both may be changed in place, by `.data` without a trace."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._copy = tensor, tensor.clone()
        self._version, self._place = version(tensor), _place(tensor)
        self._storage: Any = tensor.untyped_storage() if self._place else None

    def is_written(self, *, numbers: bool = True) -> bool:
        """Without a look at `numbers`, which takes time, what `.data` has written is not seen."""
        now = self._tensor
        if version(now) != self._version or _place(now) != self._place:
            return True
        return numbers and not same_numbers(now, self._copy)

    def put_back(self) -> None:
        with torch.no_grad():
            if _place(self._tensor) != self._place:
                self._tensor.set_(self._storage, *self._place[1:])
            self._tensor.data.copy_(self._copy)


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """What is not a number is the same as another that is not."""
    if not is_strided(one):
        return True  # of which nobody can tell
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def cloned_alike(tensor: Tensor) -> Tensor:
    """With the same strides, for which someone may ask."""
    found = tensor.clone()
    if not is_strided(tensor) or found.stride() == tensor.stride() or 0 in tensor.stride():
        return found  # what is there once for many places cannot be written so
    with torch.no_grad():
        alike = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return alike.copy_(tensor)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    if not is_strided(tensor):
        return ()
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()
