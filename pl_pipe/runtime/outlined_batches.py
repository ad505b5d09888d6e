"""Batches without their numbers, for ranks whose stage needs none. a rank that loads -> *outlines* -> the others.

The rank that loads hands its batches on as they are, and tells of each what it looks like. The others' loaders are
never iterated: in the place of their batches come outlines, in which every tensor is on the meta device.

    source      loader ─► batch ─► its loops             next(): a file is read, a worker waited for
                            └─ outline ─┐
    others      loader      ·  outline ─┴► their loops   next(): one message
"""

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_pipe.errors import DataError
from pl_pipe.tensors.ghosts.specs import once_each
from pl_pipe.tensors.trees import map_tensors

_PLAIN = (str, bytes, int, float, complex, bool, type(None))

Make = Callable[[], Iterator[Any]]
"""Makes a loader's own iterator."""


class Channel(Protocol):
    """How outlines travel; a place is the number of an iteration and that of a batch in it."""

    def tell(self, place: tuple[int, int], outline: bytes | None) -> None: ...

    def hear(self, place: tuple[int, int]) -> bytes | None: ...

    def forget(self, iteration: int) -> None: ...


class Outlines:
    """What stands between loaders and loops on one rank. All ranks must iterate their loaders in the same order.

    Without a `channel` all ranks load.
    """

    def __init__(self, channel: Channel | None = None, *, loads: bool = True, tells: bool = False) -> None:
        self.some_load_none = channel is not None
        self.loads = loads
        """This rank does."""
        self._channel = channel
        self._tells = tells
        self._iterations = 0

    def through(self, make: Make) -> Iterator[Any]:
        """What the loops get in the place of a loader's iterator."""
        self._iterations += 1
        if self._channel is None or (self.loads and not self._tells):
            return make()
        if self.loads:
            return _Told(self._channel, self._iterations, make())
        return _outlined(self._channel, self._iterations)


class _Told(Iterator[Any]):
    """A loader's batches, of which others are told."""

    def __init__(self, channel: Channel, iteration: int, batches: Iterator[Any]) -> None:
        self._channel, self._iteration, self._batches = channel, iteration, batches
        self._index = 0

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._channel.tell((self._iteration, self._index), None)
            raise
        self._channel.tell((self._iteration, self._index), pickle.dumps(outline(batch)))
        self._index += 1
        return batch


def _outlined(channel: Channel, iteration: int) -> Iterator[Any]:
    index = 0
    try:
        while (content := channel.hear((iteration, index))) is not None:
            yield pickle.loads(content)
            index += 1
    finally:
        channel.forget(iteration)


def outline(batch: Any) -> Any:
    """The batch with its tensors on the meta device."""
    found = unfit_part(batch)
    if found is not None:
        raise DataError(
            f"the batch holds {found}, which cannot be outlined for the ranks that load no data, and the first batch "
            f"held none; set load_data=all"
        )
    return map_tensors(batch, once_each(_on_meta))


def unfit_part(tree: Any) -> str | None:
    """What in a batch is neither a plain tensor, number or text, nor a container of such; None where all is."""
    if isinstance(tree, Tensor):
        plain = type(tree) is Tensor and tree.layout is torch.strided and not tree.is_quantized
        return None if plain and not tree.requires_grad else f"a tensor of another kind ({type(tree).__name__})"
    if type(tree) in _PLAIN:
        return None
    if type(tree) in (list, tuple) or (isinstance(tree, tuple) and hasattr(tree, "_fields")):
        parts = list(tree)
    elif isinstance(tree, Mapping) and type(tree) is dict:
        parts = [*tree.keys(), *tree.values()]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        parts = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        return f"a {type(tree).__name__}"
    return next((found for part in parts if (found := unfit_part(part)) is not None), None)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
