"""Indexing of arrays, and writes through an index.

x[1, :, idx]  ->  x[:, 1, :, idx]   would put idx's dimensions before the variants': left to vmap
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pl_pipe.tensors.arrays.elementwise import widened
from pl_pipe.tensors.arrays.marks import is_array, mark


def read_at(array: Any, index: Any) -> Any:
    """`array[index]`, or NotImplemented."""
    items = _items(index)
    if items is None or not is_array(array):
        return NotImplemented
    return mark(array[(slice(None), *items)])


def write_at(array: Any, index: Any, value: Any) -> bool:
    """`array[index] = value`; False where it cannot be done for the whole array at once."""
    items = _items(index)
    if items is None or not is_array(array):
        return False
    place = (slice(None), *items)
    if is_array(value):
        full = array[0][items].ndim
        if value.ndim - 1 > full:
            return False
        value = widened(value, full)
    array[place] = value
    return True


def _items(index: Any) -> tuple[Any, ...] | None:
    """The index for one variant, where a colon before it means the same for all of them."""
    items = index if isinstance(index, tuple) else (index,)
    if all(_is_plain(item) for item in items):
        return items
    if any(is_array(item) or (isinstance(item, Sequence) and not isinstance(item, range)) for item in items):
        return None
    advanced = [position for position, item in enumerate(items) if isinstance(item, Tensor | int | bool)]
    if any(isinstance(items[position], bool) for position in advanced):
        return None
    # Apart from each other, their dimensions would move to the front: before the variants'.
    adjacent = advanced == list(range(advanced[0], advanced[-1] + 1)) if advanced else False
    others_plain = all(_is_plain(item) or isinstance(item, Tensor) for item in items)
    return items if adjacent and others_plain else None


def _is_plain(item: Any) -> bool:
    return item is None or item is Ellipsis or (isinstance(item, int | slice) and not isinstance(item, bool))
