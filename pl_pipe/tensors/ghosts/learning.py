"""What a call of a module leaves behind, learnt once and repeated without running it.

Most of a model belongs to other stages, and what a rank must know of it is small: which ghosts come out, whose they
are, who holds what, what was changed in place, which attributes were set. That is the same for every batch of the same
signature, unless something happened that has to happen again: a transfer to or from this rank, an operation on it, a
number read. A learner listens for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pl_pipe.tensors.ghosts.holders import HolderState, is_holder, objects_of, tensors_of
from pl_pipe.tensors.ghosts.specs import TensorSpec, once_each
from pl_pipe.tensors.ghosts.step import GhostStep
from pl_pipe.tensors.ghosts.values import Value
from pl_pipe.tensors.trees import map_tensors, tensors_in

_PLAIN = (int, float, bool, str, bytes, type(None))
_LARGE = 1 << 20
_STORES = ("_parameters", "_buffers")

Snapshot = dict[nn.Module, dict[str, Any]]


class Output(NamedTuple):
    """A ghost to make: its value and whose memory it shares."""

    spec: TensorSpec
    home: int
    holders: int
    input: int | None
    """The argument that it is a view of."""
    group: int
    """Outputs of one group share memory."""


class Effect(NamedTuple):
    module: nn.Module
    attribute: str
    output: Output


@dataclass(frozen=True)
class Learnt:
    """All that a call does on a rank that takes no part in it."""

    tree: Any
    """What is returned, with a placeholder for each tensor."""
    outputs: dict[int, Output | int]
    """By the placeholder's id: a ghost to make, or the number of an argument that is handed through."""
    effects: tuple[Effect, ...]
    changed: tuple[int, ...]
    """Arguments changed in place."""
    changed_by: int
    holders: tuple[tuple[int, int], ...]
    """Arguments that went to other stages, and who holds them then."""
    filled: tuple[HolderState, ...] = ()
    """What objects that hold tensors have then."""

    def repeat(
        self,
        step: GhostStep,
        tensors: Sequence[Tensor],
        values: Sequence[Value | None],
        holders: Sequence[Any] = (),
    ) -> Any:
        for index, stages in self.holders:
            value = values[index]
            if value is not None:
                value.holders |= stages
        groups: dict[int, Value] = {}
        for effect in self.effects:
            setattr(effect.module, effect.attribute, _ghost(step, effect.output, values, groups))
        for index in self.changed:
            step.mutated(tensors[index], self.changed_by, None)

        def made(placeholder: Tensor) -> Tensor:
            output = self.outputs.get(id(placeholder))
            if output is None:
                return placeholder
            return tensors[output] if isinstance(output, int) else _ghost(step, output, values, groups)

        for holder, state in zip(holders, self.filled, strict=True):
            held = list(tensors_of(holder))

            def kept(mark: Any, held: list[Tensor] = held) -> Any:
                if isinstance(mark, _Held):
                    return held[mark.place]
                return _ghost(step, mark, values, groups) if isinstance(mark, Output) else mark

            state.put_into(holder, kept)

        def given(thing: Any) -> Any:
            return holders[thing.place] if isinstance(thing, _GivenHolder) else thing

        if isinstance(self.tree, Tensor):
            return made(self.tree)
        return map_tensors(self.tree, once_each(made), other=given)


class _GivenHolder:
    """Stands for one of the objects that the call was given."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Held(NamedTuple):
    """Stands for a tensor that a holder had before, by its place."""

    place: int


def _ghost(step: GhostStep, output: Output, values: Sequence[Value | None], groups: dict[int, Value]) -> Tensor:
    base = None if output.input is None else values[output.input]
    relative = base if base is not None and base.home == output.home else groups.get(output.group)
    family = None if relative is None else relative.relatives()
    ghost = step.new_ghost(output.spec, output.home, family)
    value = step.value(ghost)
    assert value is not None
    groups.setdefault(output.group, value)
    value.holders = output.holders
    return ghost


class Learner:
    """Listens while a module runs for shapes only, and says what of it can be repeated."""

    def __init__(
        self,
        step: GhostStep,
        module: nn.Module,
        values: Sequence[Value | None],
        *,
        holders: Sequence[Any] = (),
        are_stand_ins: bool = False,
    ) -> None:
        """With stand-ins, what is changed in place is learnt; otherwise it has happened to the caller's own."""
        self.can_repeat = True
        self.depends_on_values = False
        self._step = step
        self._module = module
        self._values = values
        self._given = {id(value) for value in values}
        self._may_change = self._given if are_stand_ins else set()
        self._start = step.births
        self._before = snapshot(module)
        self._holders = list(holders)
        self._known = [objects_of(holder) for holder in self._holders]
        self._held = [list(tensors_of(holder)) for holder in self._holders]
        self._state_before = [HolderState(holder, lambda tensor: tensor) for holder in self._holders]

    def touched(self, what: str) -> None:
        if what == "values":
            self.depends_on_values = True
        else:
            self.can_repeat = False

    def used(self, value: Value) -> None:
        """A tensor that came neither as an argument nor from within is an input that no signature shows."""
        if value.born <= self._start and not value.is_state and id(value) not in self._given:
            self.can_repeat = False

    def changed(self, value: Value) -> None:
        if value.born <= self._start and not value.is_state and id(value) not in self._may_change:
            self.can_repeat = False

    def learn(self, out: Any, given: Sequence[Tensor], *, changed: Sequence[int] = (), at: int | None = None) -> Learnt:
        """What to repeat, if it can be. With `at`, all that comes out is that stage's, and `given` are stand-ins."""
        index_of = {id(tensor): index for index, tensor in enumerate(given)}
        input_of = {value.memory_key: index for index, value in enumerate(self._values) if value is not None}
        groups: dict[int, int] = {}
        outputs: dict[int, Output | int] = {}

        def output_of(tensor: Tensor) -> Output | None:
            value = self._step.value(tensor)
            if at is None and (value is None or value.is_state):
                return None  # follows from the batch, or is a weight: not a ghost to be made
            home = value.home if at is None and value is not None else at
            assert home is not None
            family = value.memory_key if value is not None else id(tensor)
            source = input_of.get(family)
            holders = value.holders if value is not None and at is None else 1 << home
            spec = self._step.spec(tensor, value)
            return Output(spec, home, holders, source, groups.setdefault(family, len(groups)))

        def placeholder(tensor: Tensor) -> Tensor:
            index = index_of.get(id(tensor))
            output: Output | int | None
            if index is not None and (at is None or index in changed or self._values[index] is None):
                output = index
            else:
                output = output_of(tensor)
            if output is None:
                self.can_repeat = False
                return tensor
            stand_in = torch.empty(0)
            outputs[id(stand_in)] = output
            return stand_in

        places = {id(holder): place for place, holder in enumerate(self._holders)}

        def of_holder(thing: Any) -> Any:
            if id(thing) in places:
                return _GivenHolder(places[id(thing)])
            if is_holder(thing):
                self.can_repeat = False  # made anew by every call
            return thing

        tree = map_tensors(out, once_each(placeholder), other=of_holder)
        filled = []
        for holder, known, held in zip(self._holders, self._known, self._held, strict=True):
            before = {id(tensor): place for place, tensor in enumerate(held)}

            def mark(tensor: Tensor, before: dict[int, int] = before) -> Any:
                if id(tensor) in before:
                    return _Held(before[id(tensor)])
                output = output_of(tensor)
                if output is None:
                    self.can_repeat = False
                return output or tensor

            filled.append(HolderState(holder, mark, known=known))
        if at is not None:
            for state in self._state_before:
                state.put_back()
        effects = []
        for module, attribute in changes(self._module, self._before):
            kept = getattr(module, attribute)
            output = output_of(kept) if isinstance(kept, Tensor) else None
            if output is None:
                self.can_repeat = False  # Python state of its own
            else:
                effects.append(Effect(module, attribute, output))
        holders = tuple(
            (index, value.holders) for index, value in enumerate(self._values) if value is not None and at is None
        )
        changed_by = -1 if at is None else at
        return Learnt(tree, outputs, tuple(effects), tuple(changed), changed_by, holders, tuple(filled))


def snapshot(module: nn.Module) -> Snapshot:
    """All attributes of a module and its parts, to tell later what forward assigned."""
    return {part: _attributes(part) for part in module.modules()}


def changes(module: nn.Module, before: Snapshot) -> list[tuple[nn.Module, str]]:
    """Attributes that were assigned since `before`."""
    found = []
    for part in module.modules():
        old = before.get(part, {})
        for name, value in _attributes(part).items():
            same = name in old and (old[name] is value or (isinstance(value, _PLAIN) and old[name] == value))
            if not same:
                found.append((part, name))
    return found


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = dict(vars(module))
    for store in _STORES:
        found.update(found.pop(store))
    return found


def has_hidden_tensors(out: Any) -> bool:
    """Whether an object that is no container of ours holds tensors: it cannot be rebuilt with other ones."""
    seen: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        seen.add(id(tensor))
        return tensor

    def note_held(thing: Any) -> Any:
        if is_holder(thing):
            seen.update(id(tensor) for tensor in tensors_of(thing))
        return thing

    map_tensors(out, note, other=note_held)
    return any(id(tensor) not in seen for tensor in tensors_in(out))


def digest(tensor: Tensor) -> Any:
    """Equal for equal contents."""
    if tensor.is_meta:  # of a batch that is not here, and on whose contents nothing depends
        return tensor.dtype, tensor.shape
    if tensor.numel() > _LARGE:
        return object()
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hash((tensor.dtype, tensor.shape, flat.numpy().tobytes()))
