"""Hands what one module's Python has done to its attributes to the modules of the other variants. See `kept`.

A list, a dictionary or an object of the first variant has its twin in each other variant, at the same place. What was
put into the one is put into the others, each with the variant's own part of what is an array; what was not touched
stays each one's own. Nothing is changed before all is known to be possible.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import alike
from pl_pipe.tensors.arrays import is_array
from pl_pipe.tensors.plain_state import PlainState, contents, copied, fill, is_atom, same_items

_ABSENT = object()


class Handing:
    def __init__(
        self,
        before: PlainState,
        modules: Mapping[int, Sequence[nn.Module]],
        split: Callable[[Tensor], Sequence[Tensor]],
        is_same: Callable[[Any, Any], bool],
    ) -> None:
        """`before` is the first variant's state; `modules` are all variants', by the first one's id."""
        self.before = before
        self.modules = modules
        self.split = split
        self.is_same = is_same
        self._others: dict[int, _Other] = {}
        self._unchanged: dict[int, tuple[Any, int]] = {}

    def hand_out(self, of_all: Sequence[nn.Module], attribute: str, was: Mapping[str, Any]) -> None:
        """An attribute of the first of these modules, which the first variant's Python has changed."""
        now = vars(of_all[0]).get(attribute, _ABSENT)
        for variant, module in enumerate(of_all[1:], 1):
            other = self._others.setdefault(variant, _Other(self, variant))
            other.receive(vars(module), attribute, now, was.get(attribute, _ABSENT))

    def finish(self) -> None:
        for other in self._others.values():
            other.finish()

    def inside(self, value: Any) -> Any:
        """What is in a container or an object; nothing in a part of the model."""
        return None if is_atom(value) or id(value) in self.modules else contents(value)

    def is_changed(self, value: Any) -> bool:
        return self.before.is_changed(value, self.is_same)

    def unchanged(self, now: list[Any], was: list[Any]) -> int:
        """How many items at the beginning are as they were; asked for every variant, and found once."""
        if id(was) not in self._unchanged:
            pairs = enumerate(zip(now, was, strict=False))
            places = (place for place, (one, old) in pairs if not self.is_same(one, old) or self.is_changed(one))
            self._unchanged[id(was)] = was, next(places, min(len(now), len(was)))
        return self._unchanged[id(was)][1]

    def all_attributes(self, variant: int) -> Iterator[tuple[Any, Any]]:
        """Of all modules: what the first variant had, and what the other has at the same place."""
        for module, attributes in zip(self.before.modules, self.before.attributes, strict=True):
            theirs = vars(self.modules[id(module)][variant])
            for name in attributes.keys() & theirs.keys():
                yield attributes[name], theirs[name]


class _Other:
    """One of the other variants."""

    def __init__(self, handing: Handing, variant: int) -> None:
        self._handing = handing
        self._variant = variant
        self._twins: dict[int, Any] = {}
        """Of what the first variant had before."""
        self._has_met_all = False
        self._met: set[int] = set()
        self._handed: dict[int, Any] = {}
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []
        self._fills: list[tuple[Any, Any]] = []
        self._writes: list[tuple[Tensor, Tensor]] = []
        self._name = ""

    def receive(self, stored: dict[str, Any], attribute: str, now: Any, was: Any) -> None:
        self._name = attribute
        value = now if now is _ABSENT else self._value(now, was, stored.get(attribute, _ABSENT))
        self._attributes.append((stored, attribute, value))

    def finish(self) -> None:
        for tensor, values in self._writes:
            tensor.data.copy_(values)
        for holder, items in self._fills:
            fill(holder, items)
        for stored, attribute, value in self._attributes:
            if value is _ABSENT:
                stored.pop(attribute, None)
            else:
                stored[attribute] = value

    def _value(self, now: Any, was: Any, theirs: Any) -> Any:
        """At a place that has a name: what is there now, what was there, and what the other variant has there."""
        handing = self._handing
        if theirs is not _ABSENT and handing.is_same(now, was) and not handing.is_changed(now):
            return theirs
        self._meet(was, theirs)
        if not isinstance(was, Tensor) and handing.inside(was) is None and not alike(was, theirs):
            raise self._refusal()
        return self._part(now)

    def _part(self, now: Any) -> Any:
        """Of something that is new, or at another place, or has changed inside."""
        before = self._handing.before
        if is_array(now):
            return self._handing.split(now)[self._variant]
        if isinstance(now, Tensor):
            if id(now) not in before.tensors:
                return now  # the same for all variants
            twin = self._twin(now)
            if before.is_written(now) and twin is not now:
                self._writes.append((twin, now))
            return twin
        if id(now) in self._handing.modules:
            return self._handing.modules[id(now)][self._variant]
        if id(now) not in self._handed:
            items = self._handing.inside(now)
            if items is None:
                return now
            self._hand(now, items)
        return self._handed[id(now)]

    def _hand(self, now: Any, items: Any) -> None:
        """A container or an object."""
        if isinstance(now, tuple):
            self._handed[id(now)] = copied(now, [self._part(item) for item in items])
            return
        _, was = self._handing.before.holders.get(id(now), (None, None))
        twin = self._handed[id(now)] = copied(now, items) if was is None else self._twin(now)
        if twin is now:
            if self._handing.is_changed(now):
                raise FusionError(f"the step changes what is in {self._name!r}, one object that all variants hold")
            return
        self._fills.append((twin, self._items(items, was, None if was is None else contents(twin))))

    def _items(self, now: Any, was: Any, theirs: Any) -> Any:
        """What is to be in the twin; `was` and `theirs` are None where there was none."""
        if isinstance(now, dict):
            was, theirs = was or {}, theirs or {}
            if was.keys() != theirs.keys():
                raise self._refusal()
            return {
                key: self._value(item, was.get(key, _ABSENT), theirs.get(key, _ABSENT)) for key, item in now.items()
            }
        if isinstance(now, list):
            was, theirs = was or [], theirs or []
            count = self._handing.unchanged(now, was)
            if count == len(was):  # more was added, and does not depend on what was there
                return [*theirs, *map(self._part, now[count:])]
            if len(was) != len(theirs):
                raise self._refusal()
            for mine, other in zip(was, theirs, strict=True):
                self._meet(mine, other)
                if is_atom(mine) and not alike(mine, other):
                    raise self._refusal()
            return [self._part(item) for item in now]
        if was is not None and not same_items(was, theirs, alike):
            raise self._refusal()
        return now

    def _meet(self, was: Any, theirs: Any) -> None:
        """What lies at the same place is a twin."""
        if not is_atom(was) and type(was) is type(theirs):
            self._twins.setdefault(id(was), theirs)

    def _twin(self, now: Any) -> Any:
        if id(now) not in self._twins and not self._has_met_all:  # it may have been moved here from anywhere
            self._has_met_all = True
            for mine, other in self._handing.all_attributes(self._variant):
                self._meet_all(mine, other)
        if id(now) not in self._twins:
            raise self._refusal()
        return self._twins[id(now)]

    def _meet_all(self, was: Any, theirs: Any) -> None:
        if is_atom(was) or id(was) in self._met or type(was) is not type(theirs):
            return
        self._met.add(id(was))
        self._meet(was, theirs)
        _, items = self._handing.before.holders.get(id(was), (None, None))
        if items is not None:
            self._meet_contents(items, contents(theirs))

    def _meet_contents(self, was: Any, theirs: Any) -> None:
        if isinstance(was, dict):
            for key in was.keys() & theirs.keys():
                self._meet_all(was[key], theirs[key])
        elif isinstance(was, list):
            for pair in zip(was, theirs, strict=False):
                self._meet_all(*pair)

    def _refusal(self) -> FusionError:
        return FusionError(
            f"the step changes {self._name!r}, which is not the same for all variants, but runs once for all of them"
        )
