"""Which settings differ between variants, as often as it is asked. modules -> *settings* -> VariantArray.

Comparing everything takes milliseconds, or much longer where modules hold data, and hooks may set something before
every step. So an attribute is compared again only where a variant has something else in it than before: another value,
or other things in what can be written to.
"""

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import is_dataclass
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import HOOKS, IGNORED, alike, alike_in_all, fields_of
from pl_pipe.tensors.lineage import version
from pl_pipe.tensors.plain_state import is_atom, is_object

_DEPTH = 12
"""Further than settings are compared."""
_UNWRITTEN = frozenset((int, float, bool, complex, str, bytes, type(None), FunctionType, BuiltinFunctionType))
_MANY = 1000
"""Things in a container: data, which hooks do not set one by one."""


class Settings:
    def __init__(self, variants: Sequence[nn.Module], own: Iterable[str]) -> None:
        """Attributes named in `own` may differ."""
        ids = frozenset(id(part) for variant in variants for part in variant.modules())
        ignored = IGNORED.union(own)
        named = zip(*(variant.named_modules() for variant in variants), strict=True)
        self._parts = [_Part(of_all[0][0], [part for _, part in of_all], ignored, ids) for of_all in named]
        self.compare()

    @property
    def differing(self) -> dict[str, tuple[str, ...]]:
        """For each module's name its own attributes that are not the same in all variants; some may not have them."""
        return {part.name: tuple(part.differing) for part in self._parts if part.differing}

    def compare(self, arrays: Container[tuple[nn.Module, str]] = ()) -> None:
        """What differs now. Of attributes in `arrays`, by the first one's module, tensors may hold other numbers."""
        if any(part.has_other_parts() for part in self._parts):
            raise FusionError(
                "a variant has other modules than when the array was made; make them in __init__, configure_model or "
                "setup, or train with formulation='one by one'"
            )
        for part in self._parts:
            part.compare(arrays)


class _Part:
    """One module of all variants."""

    def __init__(self, name: str, modules: Sequence[nn.Module], ignored: frozenset[str], ids: Container[int]) -> None:
        self.name = name
        self.differing: dict[str, None] = {}
        """In their order."""
        self._first, self._stored = modules[0], [vars(module) for module in modules]
        self._children = [(module._modules, list(module._modules.values())) for module in modules]
        self._ignored = ignored
        self._is_alike = partial(alike, parts=ids)
        self._seen: list[tuple[int, list[str], list[Any]]] = [(0, [], [])] * len(modules)
        """Of each variant: how many attributes there are, and those that are settings."""
        self._held: list[dict[str, Any]] = [{}] * len(modules)
        """What is in them, where that can be written to."""

    def has_other_parts(self) -> bool:
        return any(
            len(now) != len(known) or (known and not all(map(is_, now.values(), known)))
            for now, known in self._children
        )

    def compare(self, arrays: Container[tuple[nn.Module, str]]) -> None:
        touched: dict[str, None] = {}
        for place, stored in enumerate(self._stored):
            held = self._holdings(stored)
            if self._is_as_seen(place, stored) and held == self._held[place]:
                continue
            self._note_touched(touched, place, stored, held)
            names = [name for name in stored if name not in self._ignored]
            self._seen[place] = len(stored), names, [stored[name] for name in names]
            self._held[place] = held
        for name in touched:
            numbers = (self._first, name) not in arrays
            if alike_in_all(name, self._stored, partial(self._is_alike, numbers=numbers)):
                self.differing.pop(name, None)
            else:
                self.differing.setdefault(name)

    def _is_as_seen(self, place: int, stored: dict[str, Any]) -> bool:
        count, names, values = self._seen[place]
        return len(stored) == count and all(map(is_, map(stored.get, names), values))

    def _note_touched(self, touched: dict[str, None], place: int, stored: dict[str, Any], held: dict[str, Any]) -> None:
        _, names, values = self._seen[place]
        was = dict(zip(names, values, strict=True))
        for name in (*names, *stored):
            is_same = name in was and name in stored and was[name] is stored[name]
            if name not in self._ignored and not (is_same and held.get(name) == self._held[place].get(name)):
                touched.setdefault(name)

    def _holdings(self, stored: dict[str, Any]) -> dict[str, Any]:
        return {
            name: stamp(value)
            for name, value in stored.items()
            if name not in self._ignored and type(value) not in _UNWRITTEN and not (name in HOOKS and not value)
        }


def stamp(value: Any, depth: int = _DEPTH) -> Any:
    """Another one where something was put into a value, or a tensor in it was written to."""
    if is_atom(value):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else version(value)
    if depth == 0 or isinstance(value, nn.Module | type):
        return id(value)
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.size <= _MANY else ()
    if isinstance(value, list | tuple | deque | set | frozenset):
        inner: Any = () if len(value) > _MANY else tuple(stamp(item, depth - 1) for item in value)
        return id(value), len(value), inner
    items = value if isinstance(value, dict) else fields_of(value) if _is_object(value) else None
    if items is None:
        return id(value)
    inner = () if len(items) > _MANY else tuple((key, stamp(item, depth - 1)) for key, item in items.items())
    return id(value), len(items), inner


def _is_object(value: Any) -> bool:
    return is_object(value) or (hasattr(type(value), "__slots__") and is_dataclass(value))
