"""Counts the memory that a step keeps for its backward pass, as it is being kept."""

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pl_pipe.tensors.lineage import storage_key


class SavedBytes:
    """Bytes of storages saved for backward, each counted once; the model's own state is there anyway."""

    def __init__(self, state: Iterable[Tensor]) -> None:
        self._state = {storage_key(tensor) for tensor in state}
        self._seen: dict[int, StorageWeakRef] = {}
        self._fresh_bytes = 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, _unpack)

    def take(self) -> int:
        """What was saved since the last call."""
        fresh, self._fresh_bytes = self._fresh_bytes, 0
        return fresh

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key not in self._state and key not in self._seen:
            try:
                storage = tensor.untyped_storage()
                # Held so that the address is not given out again.
                self._seen[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._fresh_bytes += storage.nbytes()
            except (NotImplementedError, RuntimeError):
                self._fresh_bytes += tensor.numel() * tensor.element_size()
        return tensor


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
