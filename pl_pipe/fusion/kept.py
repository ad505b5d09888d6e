"""What modules keep in Python from one forward to the next: a hidden state, a cache, lists of results, counters.

Parameters and buffers have their places. The rest is the first variant's to read and to write while its Python runs for
all, so before a forward the variants' tensors are put together there, and afterwards what it has left is handed out:

    self.preds.append(logits.argmax(1))     an array: every variant's list gets its own part
    self.targets.append(y)                  shared: every variant's list gets it
    self.meter.count += len(y)              every variant's meter counts
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import alike, has_tensor
from pl_pipe.fusion.handing import Handing
from pl_pipe.fusion.settings import stamp
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.lineage import version
from pl_pipe.tensors.plain_state import PlainState, contents, copied, fill, is_atom, values_in

_OF_TORCH = "torch.nn.modules."
_PLACES = (frozenset(vars(nn.Module())) - {"training"}) | {"_flat_weights", "_compiled_call_impl"}
_WHOLE = "_pl_pipe_whole"
"""On the first variant's part of an array: the array, and all parts."""


class KeptState:
    def __init__(
        self,
        variants: Sequence[nn.Module],
        apart: Iterable[nn.Module],
        own: Collection[str] = (),
        arrays: Collection[tuple[nn.Module, str]] = (),
    ) -> None:
        """Modules under `apart` run once a variant, and keep what they keep by themselves; so do attributes `own`.
        `arrays` are known to hold such."""
        by_themselves = {part for module in apart for part in module.modules()}
        everything = [list(of_all) for of_all in zip(*(variant.modules() for variant in variants), strict=True)]
        self._modules = [
            of_all
            for of_all in everything
            if of_all[0] not in by_themselves
            and (not type(of_all[0]).__module__.startswith(_OF_TORCH) or of_all[0]._forward_pre_hooks)
        ]
        self._of_all = {id(of_all[0]): of_all for of_all in everything}
        self._ignored = _PLACES | (frozenset(own) - {"training"})
        self._known = {
            (place, attribute)
            for place, of_all in enumerate(self._modules)
            for module, attribute in arrays
            if of_all[0] is module
        }
        """Left by a fused forward."""
        self._differing: set[tuple[int, str]] = set()
        self._stamps: dict[tuple[int, str], list[Any]] = {}
        """Of what was compared."""
        self.compare()
        self._forget()

    @property
    def arrays(self) -> set[tuple[nn.Module, str]]:
        """Attributes, by the first variant's module, in which a fused forward has left arrays."""
        return {(self._modules[place][0], attribute) for place, attribute in self._known}

    def compare(self) -> None:
        """Which tensors are each variant's own."""
        for place, (first, *others) in enumerate(self._modules):
            for attribute, value in vars(first).items():
                if attribute in self._ignored or not has_tensor(value):
                    continue
                values = [vars(other).get(attribute) for other in others]
                stamps = [stamp(one) for one in (value, *values)]
                if self._stamps.get((place, attribute)) == stamps:
                    continue
                self._stamps[place, attribute] = stamps
                if all(alike(value, other) for other in values):
                    self._differing.discard((place, attribute))
                else:
                    self._differing.add((place, attribute))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the first variant's modules have what all variants keep."""
        try:
            self._show()
            yield
            self._hide()
        except BaseException:
            self._before.restore()
            raise
        finally:
            self._forget()

    def _show(self) -> None:
        self._before = PlainState([of_all[0] for of_all in self._modules], self._ignored, registered=self._of_all)
        arrays: dict[int, Tensor] = {}
        for place, attribute in self._known | self._differing:
            tensors: dict[int, list[Tensor]] = {}
            try:
                self._pair([vars(module).get(attribute) for module in self._modules[place]], tensors, set())
                arrays.update({key: self._together(of_all) for key, of_all in tensors.items() if key not in arrays})
            except FusionError:
                if (place, attribute) in self._known:
                    raise
                # a metric's, most likely: nothing that a forward reads
        for place, attribute in self._known | self._differing:
            stored = vars(self._modules[place][0])
            if attribute in stored:
                stored[attribute] = self._put(stored[attribute], arrays, self._shown)

    def _hide(self) -> None:
        """After a forward: every variant has its own, as if its own module had run."""
        handing = Handing(self._before, self._of_all, self._split, self._is_as_shown)
        touched = list(self._before.changed(self._is_as_shown))
        for place, attribute in touched:
            handing.hand_out(self._modules[place], attribute, self._before.attributes[place])
        handing.finish()
        arrays: dict[int, Tensor] = {}
        kept = []
        for place, attribute in {*touched, *self._known, *self._differing}:
            value = vars(self._modules[place][0]).get(attribute)
            if self._find_arrays(value, arrays, set()):
                kept.append((place, attribute))
        own = {key: self._split(array)[0] for key, array in arrays.items()}
        made: dict[int, tuple[Any, Any]] = {}
        for place, attribute in kept:
            stored = vars(self._modules[place][0])
            stored[attribute] = self._put(stored[attribute], own, made)
        self._known.update(one for one in kept if one not in self._differing)

    def _forget(self) -> None:
        self._before = PlainState([])
        self._shown: dict[int, tuple[Any, Any]] = {}
        """For a tensor or a tuple that was there: itself, and what stands in its place."""
        self._parts: dict[int, tuple[Tensor, int | None, Sequence[Tensor]]] = {}
        """Of an array: what it was made of, if its version is still this; without one, views of it."""

    def _together(self, of_all: Sequence[Tensor]) -> Tensor:
        """The variants' tensors as an array: the one they are parts of, or a new one."""
        first = of_all[0]
        if all(one is first for one in of_all):
            return first
        whole, parts = getattr(first, _WHOLE, (first, ()))
        is_collected = id(first) in self._before.tensors and self._before.tensors[id(first)][2] is None
        if is_collected and len(parts) == len(of_all) and all(map(is_, parts, of_all)):
            self._parts[id(whole)] = whole, None, parts
            return whole
        if len({tuple(one.shape) for one in of_all}) > 1:
            raise FusionError(f"the variants' tensors have shapes {sorted({tuple(one.shape) for one in of_all})}")
        array = mark(torch.stack(tuple(of_all)))
        self._parts[id(array)] = array, version(array), of_all
        return array

    def _split(self, array: Tensor) -> Sequence[Tensor]:
        if id(array) in self._parts and self._is_unwritten(array):
            return self._parts[id(array)][2]
        parts = array.unbind(0)
        setattr(parts[0], _WHOLE, (array, parts))
        self._parts[id(array)] = array, None, parts
        return parts

    def _is_unwritten(self, array: Tensor) -> bool:
        """Arrays made for inference do not tell."""
        _, seen, _ = self._parts[id(array)]
        return seen is None or (seen == version(array) and not array.is_inference())

    def _is_as_shown(self, now: Any, was: Any) -> bool:
        if now is was:
            return True
        if id(was) not in self._shown or self._shown[id(was)][1] is not now:
            return False
        return not is_array(now) or self._split(now)[0] is was

    # ---- walks through what the first variant keeps

    def _inside(self, value: Any) -> Any:
        """What is in a container or an object; nothing in a part of the model."""
        return None if is_atom(value) or id(value) in self._of_all else contents(value)

    def _pair(self, values: Sequence[Any], found: dict[int, list[Tensor]], seen: set[int]) -> None:
        """The tensors of all variants' values, by the first one's; the values must be nested alike."""
        first = values[0]
        if isinstance(first, Tensor):
            if not all(isinstance(value, Tensor) for value in values):
                raise FusionError("where one variant keeps a tensor another keeps none")
            found[id(first)] = list(values)
            return
        if id(first) in seen:
            return
        inside = self._inside(first)
        if not isinstance(inside, list | dict):
            return
        seen.add(id(first))
        of_all = [inside, *(contents(value) for value in values[1:])]
        if any(type(one) is not type(inside) or len(one) != len(inside) for one in of_all):
            raise FusionError("what the variants keep is not nested alike")
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            if not is_atom(inside[key]):
                if isinstance(inside, dict) and any(key not in one for one in of_all):
                    raise FusionError(f"what the variants keep is not nested alike: {key!r} is not in all")
                self._pair([one[key] for one in of_all], found, seen)

    def _find_arrays(self, value: Any, found: dict[int, Tensor], seen: set[int]) -> bool:
        """Whether there are any."""
        if isinstance(value, Tensor):
            if is_array(value):
                found[id(value)] = value
            return is_array(value)
        if is_atom(value) or id(value) in seen:
            return False
        seen.add(id(value))
        here = [self._find_arrays(item, found, seen) for item in values_in(self._inside(value))]
        return any(here)

    def _put(self, value: Any, tensors: dict[int, Tensor], made: dict[int, tuple[Any, Any]]) -> Any:
        """Puts other tensors in the place of some; containers and objects stay the same, but for tuples."""
        if id(value) in made:
            return made[id(value)][1]
        if isinstance(value, Tensor):
            other = tensors.get(id(value), value)
            made[id(value)] = value, other
            return other
        items = self._inside(value)
        if not isinstance(items, list | dict):
            return value
        made[id(value)] = value, value
        before = list(values_in(items))
        after = [self._put(item, tensors, made) for item in before]
        if not all(map(is_, after, before)):
            filled = dict(zip(items, after, strict=True)) if isinstance(items, dict) else after
            if isinstance(value, tuple):
                made[id(value)] = value, copied(value, filled)
            else:
                fill(value, filled)
        return made[id(value)][1]
