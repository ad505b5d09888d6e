"""Finds the tensors in what layers take and return: containers, dataclasses, packed sequences, model outputs."""

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

# Never looked into: they hold no tensors of a step, or (modules) own theirs.
OPAQUE = (
    *(str, bytes, int, float, complex, type(None), type, ModuleType),
    *(FunctionType, BuiltinFunctionType, MethodType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module),
)
# A batch may be an object within an object; deeper ones are no containers of tensors but someone's machinery.
_OBJECT_DEPTH = 3


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors of a nested value, each once, in the order of its fields."""
    found: dict[int, Tensor] = {}
    _collect(tree, found, set(), _OBJECT_DEPTH)
    return list(found.values())


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor], *, other: Callable[[Any], Any] | None = None) -> Any:
    """The same nested value with every tensor changed.

    Objects that are no containers are shared with the original, or what `other` gives for them.
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, OPAQUE):
        return tree
    if isinstance(tree, tuple):
        items = [map_tensors(item, change, other=other) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, deque):
        return type(tree)((map_tensors(item, change, other=other) for item in tree), tree.maxlen)
    if isinstance(tree, list):
        return type(tree)(map_tensors(item, change, other=other) for item in tree)
    if isinstance(tree, Mapping):
        changed = copy.copy(tree)
        for key, item in tree.items():
            changed[key] = map_tensors(item, change, other=other)  # type: ignore[index]
        return changed
    if dataclasses.is_dataclass(tree):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(twin, field.name, map_tensors(getattr(tree, field.name), change, other=other))
        return twin
    return tree if other is None else other(tree)


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _collect(tree: Any, found: dict[int, Tensor], seen: set[int], depth: int) -> None:
    if isinstance(tree, Tensor):
        found[id(tree)] = tree
    elif not isinstance(tree, OPAQUE) and id(tree) not in seen:
        seen.add(id(tree))
        items, is_object = _items(tree)
        if is_object:
            depth -= 1
        if depth >= 0:
            for item in items:
                _collect(item, found, seen, depth)


def _items(tree: Any) -> tuple[Iterable[Any], bool]:
    """What a value holds, and whether it is an object rather than a container."""
    if isinstance(tree, tuple | list | set | frozenset | deque):
        return tree, False
    if isinstance(tree, Mapping):
        return tree.values(), False
    if isinstance(tree, slice):
        return (tree.start, tree.stop, tree.step), False
    if type(tree) in _pytree.SUPPORTED_NODES:
        return _pytree.SUPPORTED_NODES[type(tree)].flatten_fn(tree)[0], False
    if dataclasses.is_dataclass(tree):
        return [getattr(tree, field.name, None) for field in dataclasses.fields(tree)], False
    return list(getattr(tree, "__dict__", {}).values()), True
