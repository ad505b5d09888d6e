"""Objects that hold tensors and go from module to module, each of which adds its own: a decoder's cache.

    cache ──► layer 0 ──► layer 1 ──► …        every rank has the object; its tensors are where their layers are

A holder is not exchanged for another one when it is passed on, and what it holds is not sent: a module that needs what
another stage has put there cannot have it.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor

from pl_pipe.tensors.trees import OPAQUE

_OTHERS = sys.stdlib_module_names | {"torch", "numpy", "lightning", "pl_pipe", "omegaconf", "tokenizers", "PIL"}
_DEPTH = 4
_SEQUENCES = (list, tuple, set, deque)


def is_holder(value: Any) -> bool:
    """Some object with tensors somewhere in it, or that is there to take some."""
    if not _is_object(value):
        return False
    return "cache" in type(value).__name__.lower() or next(tensors_of(value), None) is not None


def _is_object(value: Any) -> bool:
    if isinstance(value, (Tensor, dict, *_SEQUENCES, *OPAQUE)) or is_dataclass(value):
        return False
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and kind.__module__.partition(".")[0] not in _OTHERS
        and not hasattr(kind, "to_diff_dict")  # a configuration of transformers
    )


def holders_in(tree: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Those in nested containers."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, _SEQUENCES):
        for item in tree if depth else ():
            yield from holders_in(item, depth - 1)
    elif is_holder(tree):
        yield tree


def tensors_of(holder: Any) -> Iterator[Tensor]:
    for thing in _walk(holder, set(), _DEPTH):
        if isinstance(thing, Tensor):
            yield thing


def objects_of(holder: Any) -> list[Any]:
    """The holder itself, and the objects within it, in a fixed order."""
    return [thing for thing in _walk(holder, set(), _DEPTH) if not isinstance(thing, Tensor)]


def structure_of(holder: Any, tensors: list[Tensor]) -> Any:
    """Equal for holders that look alike; the tensors are appended."""

    def look(value: Any, depth: int) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Tensor
        if isinstance(value, dict):
            return (type(value), *[(key, look(item, depth)) for key, item in value.items()])
        if isinstance(value, _SEQUENCES):
            return (type(value), *[look(item, depth) for item in value])
        if depth and _is_object(value):
            return (type(value), *[(name, look(item, depth - 1)) for name, item in vars(value).items()])
        return (type(value), value)

    return look(holder, _DEPTH)


def _walk(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _walk(item, seen, depth)
    elif isinstance(value, _SEQUENCES):
        for item in list(value):
            yield from _walk(item, seen, depth)
    elif depth and id(value) not in seen and _is_object(value):
        seen.add(id(value))
        yield value
        for item in list(vars(value).values()):
            yield from _walk(item, seen, depth - 1)


@dataclass(frozen=True)
class _Known:
    """Stands for an object that the holder had before, by its place."""

    place: int


@dataclass(frozen=True)
class _Mark:
    """What is kept of a tensor."""

    content: Any


@dataclass(frozen=True)
class _New:
    """Stands for an object that was made."""

    kind: type
    attributes: dict[str, Any]


class HolderState:
    """What was in a holder, to be put back, or to be put into another one that looks alike."""

    def __init__(self, holder: Any, change: Callable[[Tensor], Any], *, known: list[Any] | None = None) -> None:
        """
        Args:
            change: gives what is kept of a tensor.
            known: the objects that it had before, if others may have been made since.
        """
        objects = objects_of(holder) if known is None else known
        self._places = {id(one): place for place, one in enumerate(objects)}
        self._objects = objects
        self._attributes = [self._copied(vars(one), change) for one in objects]

    def put_into(self, holder: Any, change: Callable[[Any], Tensor] | None = None) -> None:
        """`change` makes tensors of what was kept of them."""
        objects = objects_of(holder)
        for one, attributes in zip(objects, self._attributes, strict=False):
            made = self._made(attributes, objects, change)
            vars(one).clear()
            vars(one).update(made)

    def put_back(self) -> None:
        for one, attributes in zip(self._objects, self._attributes, strict=True):
            made = self._made(attributes, self._objects, None)
            vars(one).clear()
            vars(one).update(made)

    def _copied(self, value: Any, change: Callable[[Tensor], Any]) -> Any:
        if isinstance(value, Tensor):
            return _Mark(change(value))
        if isinstance(value, dict):
            return {key: self._copied(item, change) for key, item in value.items()}
        if isinstance(value, _SEQUENCES):
            return _like(value, [self._copied(item, change) for item in value])
        if id(value) in self._places:
            return _Known(self._places[id(value)])
        if _is_object(value):
            return _New(type(value), self._copied(vars(value), change))
        return value

    def _made(self, value: Any, objects: list[Any], change: Callable[[Any], Tensor] | None) -> Any:
        if isinstance(value, _Known):
            return objects[value.place]
        if isinstance(value, _New):
            made: Any = object.__new__(value.kind)
            vars(made).update(self._made(value.attributes, objects, change))
            return made
        if isinstance(value, _Mark):
            return value.content if change is None else change(value.content)
        if isinstance(value, dict):
            return {key: self._made(item, objects, change) for key, item in value.items()}
        if isinstance(value, _SEQUENCES):
            return _like(value, [self._made(item, objects, change) for item in value])
        return value


def _like(sequence: Any, items: list[Any]) -> Any:
    kind = type(sequence)
    return kind(*items) if hasattr(sequence, "_fields") else kind(items)
