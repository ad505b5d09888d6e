"""Which settings differ between variants, as often as it is asked. modules -> *settings* -> VariantArray.

Comparing everything takes milliseconds, and hooks may set something before every step. That nothing has been set is
seen at a tenth of the cost: modules have the very same values, and what these hold is compared where it can be written.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import IGNORED, alike, alike_in_all, differing_attributes
from pl_pipe.tensors.plain_state import is_atom

_OF_TORCH = "torch.nn.modules."


class Settings:
    def __init__(self, variants: Sequence[nn.Module], own: Iterable[str]) -> None:
        self._variants, self._own = list(variants), frozenset(own)
        self.differing = differing_attributes(variants, own)
        """By the modules' names."""
        self._seen = _Seen(variants, own)

    def compare(self, arrays: Container[tuple[nn.Module, str]]) -> bool:
        """Whether what differs is something else than before; `arrays` are attributes with tensors of all variants."""
        if self._seen.have_other_parts(self._variants):
            raise FusionError(
                "a variant has other modules than when the array was made; make them in __init__, configure_model or "
                "setup, or train with formulation='one by one'"
            )
        if not self._seen.may_differ():
            return False
        before, self.differing = self.differing, differing_attributes(self._variants, self._own, arrays)
        self._seen = _Seen(self._variants, self._own)
        return self.differing != before


class _Seen:
    def __init__(self, variants: Sequence[nn.Module], own: Iterable[str]) -> None:
        self._modules = [list(variant.modules()) for variant in variants]
        ignored = IGNORED.union(own)
        self._values: list[tuple[dict[str, Any], int, list[str], list[Any]]] = []
        """Of each module: its attributes, how many there were, and those that are settings."""
        self._hooks: list[tuple[nn.Module, int]] = []
        self._written: list[tuple[Sequence[Mapping[str, Any]], str]] = []
        """Of all variants: attributes with something in them that may be other things later."""
        for of_all in zip(*self._modules, strict=True):
            stored = [vars(part) for part in of_all]
            for of_one in stored:
                names = [name for name in of_one if name not in ignored]
                self._values.append((of_one, len(of_one), names, [of_one[name] for name in names]))
            self._hooks.extend((part, _count_hooks(part)) for part in of_all)
            if not type(of_all[0]).__module__.startswith(_OF_TORCH):
                self._written.extend((stored, name) for name in _holders(stored[0], ignored))
        self._ignored = ignored
        parts = frozenset(id(part) for of_one in self._modules for part in of_one)
        self._is_alike = partial(alike, parts=parts)
        self._were_alike = self._are_alike()

    def have_other_parts(self, variants: Sequence[nn.Module]) -> bool:
        """Whether a variant has a module that it had not, or another one in its place."""
        return any(
            len(known) != len(now) or not all(map(is_, known, now))
            for known, now in zip(self._modules, (list(variant.modules()) for variant in variants), strict=True)
        )

    def may_differ(self) -> bool:
        """Whether comparing may find something else than before."""
        for stored, count, names, values in self._values:
            if not all(map(is_, map(stored.get, names), values)):
                return True
            if len(stored) != count and any(name not in self._ignored for name in stored.keys() - set(names)):
                return True
        if any(_count_hooks(part) != count for part, count in self._hooks):
            return True
        return self._are_alike() != self._were_alike

    def _are_alike(self) -> list[bool]:
        return [alike_in_all(name, stored, self._is_alike) for stored, name in self._written]


def _holders(stored: Mapping[str, Any], ignored: Iterable[str]) -> list[str]:
    return [
        name
        for name, value in stored.items()
        if name not in ignored and not is_atom(value) and not isinstance(value, Tensor | nn.Module)
    ]


def _count_hooks(part: nn.Module) -> int:
    return len(part._forward_hooks) + len(part._forward_pre_hooks)
