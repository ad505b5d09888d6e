"""Which memory tensors lie in. tensors -> *taken memory* -> whether another one lies there too."""

from collections.abc import Iterable

from torch import Tensor

from pl_pipe.tensors.lineage import is_strided


class TakenMemory:
    """From the first byte of each to its last; what lies between the numbers of a view counts as its own."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for tensor in tensors:
            self.take(tensor)

    def take(self, tensor: Tensor) -> bool:
        """Whether nobody had any of it."""
        if not is_strided(tensor) or not tensor.numel():
            return True
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        end = first + (last + 1) * tensor.element_size()
        others = self._spans.setdefault(tensor.untyped_storage().data_ptr(), [])
        is_free = all(end <= begin or until <= first for begin, until in others)
        others.append((first, end))
        return is_free
