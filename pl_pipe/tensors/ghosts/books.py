"""The books that every rank keeps of a step: which value each tensor shows, whose it is and who holds it.

All ranks make the same entries in the same order; the two that a transfer concerns act on it.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts.specs import TensorSpec
from pl_pipe.tensors.ghosts.values import Value, home_of, show, state_home, value_of
from pl_pipe.tensors.lineage import storage_key, storage_reserved
from pl_pipe.tensors.operations import user_line, user_place

_AGAIN_BYTES = 1 << 14  # from here on messages have notices, and would be received though nobody takes them
_WHOLE = ", or set schedule=1f1b and num_microbatches=1, with which values also go to earlier stages"


class Exchange(Protocol):
    """Carries values between this rank and the others, and their gradients back."""

    def rounds(self, dtype: torch.dtype) -> bool:
        """Whether values of this dtype lose digits on the way, unless they are sent exactly."""

    def send(self, tensor: Tensor, target: int, *, exact: bool = False, place: int = 0) -> None: ...

    def receive(self, source: int, spec: TensorSpec, *, exact: bool = False, place: int = 0) -> Tensor: ...

    def leave_out(self, source: int, target: int, place: int) -> None: ...


class BatchNeededError(StageError):
    """A rank that does not load the batch came to where the numbers in it are needed."""


class LeaveStep(BaseException):
    """This rank has nothing left to do in the step. No Exception, so that no `except` of the user's stops it."""


class Listener(Protocol):
    """Told what happens while a call is being learnt; see `modules`."""

    def touched(self, what: str) -> None:
        """Something happened that must happen again in every batch."""

    def used(self, value: Value) -> None:
        """An operation takes the value."""

    def changed(self, value: Value) -> None:
        """The value is overwritten in place."""


class Books:
    """Values, homes and holders of one step on one rank."""

    def __init__(self, *, stage: int, exchange: Exchange, batch_is_here: bool = True) -> None:
        super().__init__()
        self.stage = stage
        self.batch_is_here = batch_is_here
        """Otherwise the batch's tensors are on the meta device, and so is what follows from them alone."""
        self.needed_at: set[int] = set()
        """Where the batch is not here: the stages that were seen to take tensors of it."""
        self.listeners: list[Listener] = []
        self.births = 0
        """Values made so far."""
        self.actions = 0
        """Operations, sends and receives of this rank so far."""
        self.last_action: int | None = None
        """After so many this rank is done, where that is known and wanted."""
        self.both_ways = False
        """Values also go to earlier stages, and those that Python reads to all: no rank leaves, and none runs ahead."""
        self.gradients_go_back = True
        """Where values go both ways: also those for which a gradient has to come."""
        self.is_hook = False
        """The user's Python is no step that has a backward of its own."""
        self.others_idle = False
        """Other replicas run the step for its Python alone, and leave it at the first read of all."""
        self.in_parts = False
        """The step runs once for each part of a batch."""
        self._exchange = exchange
        self.read_up_to = -1
        """The last stage of which a value was read: earlier ones have left the step."""
        self._received: list[Value] = []
        self._written: dict[int, tuple[Value, bool, object]] = {}
        """Memory of the batch that a stage wrote to: a value in it, whether gradients flow into it, and what keeps
        tensors that are made later from its address."""
        self.written_before: dict[int, tuple[int, object]] = {}
        """Memory that every rank had and earlier hooks wrote to: the stage that did, and the same."""

    def value(self, tensor: Tensor) -> Value | None:
        """The value that a tensor shows in this step; None for what every rank has."""
        value = value_of(tensor)
        if value is not None and value.step is self:
            return value
        home = home_of(tensor)
        if home is None:
            if self._written:
                written, needs_gradient, _ = self._written.get(storage_key(tensor), (None, False, None))
                if written is not None:
                    if needs_gradient and tensor.is_leaf and tensor.is_floating_point():
                        tensor.requires_grad_()
                    return self._show(tensor, written.home, written.relatives())
            if self.written_before:
                at, _ = self.written_before.get(storage_key(tensor), (None, None))
                return None if at is None else self._show(tensor, at)
            return None
        if value is not None and value.unseen is not None:
            raise StageError(
                f"{user_line()}: a buffer is used that an earlier step assigned after {value.unseen} had read a value, "
                f"when ranks of earlier stages had left it, so that these do not know which stage has it; assign it "
                f"before the read"
            )
        new = Value(self, home, is_state=state_home(tensor) is not None)
        new.is_parameter = isinstance(tensor, nn.Parameter)
        show(tensor, new)
        return new

    def is_absent(self, tensor: Tensor, value: Value | None) -> bool:
        """Whether a tensor follows from a batch that is not here; all other tensors on the meta device have values."""
        return not self.batch_is_here and value is None and tensor.is_meta

    def several_ranks(self) -> StageError:
        return StageError(
            f"{user_line()}: a value of another stage is used in a hook, but where a stage has several ranks only one "
            f"would get it; give each stage one device, by plan=straight"
        )

    def need_batch(self, at: int, what: str) -> None:
        """Stage `at` takes a tensor of a batch that is not here."""
        self.needed_at.add(at)
        if at == self.stage:
            raise self.batch_needed(what)

    def batch_needed(self, what: str) -> BatchNeededError:
        return BatchNeededError(
            f"{user_line()}: {what} needs numbers of the batch, which stage {self.stage} does not load, because the "
            f"first batch had no need of them there; set load_data=all"
        )

    def new_ghost(self, spec: TensorSpec, home: int, family: list[Value] | None = None) -> Tensor:
        ghost = spec.ghost()
        self._show(ghost, home, family).spec = spec
        return ghost

    def show(self, tensor: Tensor, home: int, family: list[Value] | None = None) -> Tensor:
        self._show(tensor, home, family)
        return tensor

    def _show(self, tensor: Tensor, home: int, family: list[Value] | None = None) -> Value:
        self.births += 1
        value = Value(self, home, self.births, family=family)
        show(tensor, value)
        return value

    def spec(self, tensor: Tensor, value: Value | None) -> TensorSpec:
        if value is None:
            return TensorSpec.of(tensor)
        if value.spec is None:
            value.spec = TensorSpec.of(tensor)
        spec: TensorSpec = value.spec
        return spec

    def here(self, tensor: Tensor) -> Tensor:
        """The tensor to compute with on this rank."""
        value = self.value(tensor)
        return tensor if value is None or value.real is None else value.real

    def move(self, tensor: Tensor, value: Value, target: int, *, exact: bool = False, to_read: bool = False) -> None:
        """The value goes to stage `target`, unless it is there: every rank notes it, two of them act.

        Weights always travel `exact`; so must numbers on which Python decides, because its own stage has them exact.
        What Python reads goes back without a place in the graph.
        """
        if value.outdated_by is not None:
            raise StageError(
                f"{user_line()}: stage {value.outdated_by} changed in place what this view of stage {value.home} "
                f"shows; change a copy instead: tensor.clone()"
            )
        exact = (exact or value.is_state) and self._exchange.rounds(tensor.dtype)
        is_held = value.is_held(target, exact=exact)
        place = user_place() if self.is_hook and (to_read or not is_held) else 0
        is_new = bool(place) and (place, target) not in (value.read_at or ())
        if is_new:
            value.read_at = {(place, target), *(value.read_at or ())}
        if is_held:
            if is_new:
                self._read_again(tensor, value, target, place, exact=exact)
            return
        numbers_only = to_read and value.home > target and not self.gradients_go_back
        needs_gradient = tensor.requires_grad and not numbers_only
        if value.home > target and not (self.both_ways and (self.gradients_go_back or not needs_gradient)):
            raise StageError(
                f"{user_line()}: stage {target} needs a value of the later stage {value.home}; data flow onward only, "
                f"so plan again from a profile of this very step{'' if needs_gradient else _WHOLE}"
            )
        if self.is_hook and self.others_idle:
            raise self.several_ranks()
        source = value.nearest_holder(target, exact=exact)
        if source < 0:
            source = value.home  # a later stage
        if source < self.read_up_to:
            raise StageError(
                f"{user_line()}: a value of stage {source} is needed after one of stage {self.read_up_to} was read, "
                f"when stage {source} had left the step; move the read behind this use{_WHOLE}"
            )
        value.hand_to(target, exact=exact)
        if value.is_state:
            self.touch("a weight travelled")
        if self.stage == source:
            self.touch("sent")
            real = tensor if value.real is None else value.real
            self._exchange.send(real.detach() if numbers_only else real, target, exact=exact, place=place)
        elif self.stage == target:
            self.touch("received")
            spec = self.spec(tensor, value)
            spec = spec._replace(requires_grad=False) if numbers_only else spec
            value.real = show(self._exchange.receive(source, spec, exact=exact, place=place), value)
            self._received.append(value)

    def _read_again(self, tensor: Tensor, value: Value, target: int, place: int, *, exact: bool) -> None:
        """Other lines of a hook read it, and others may not have been at the first, as under `is_global_zero`."""
        if self.stage == value.home and tensor.nbytes < _AGAIN_BYTES:
            self._exchange.send(self.here(tensor).detach(), target, exact=exact, place=place)
        elif self.stage in (value.home, target):
            self._exchange.leave_out(value.home, target, place)

    def mutated(self, tensor: Tensor, at: int, real: Tensor | None, *, needs_gradient: bool = False) -> None:
        """Stage `at` changed the tensor in place: a new value under the same name."""
        old = self.value(tensor)
        if old is not None:
            for listener in self.listeners:
                listener.changed(old)
            if old.is_state and old.home != at:
                raise StageError(
                    f"{user_line()}: stage {at} changes a parameter or buffer of stage {old.home} in place, which "
                    f"would not see it; assign a new tensor to the attribute, or plan both onto one stage{_WHOLE}"
                )
            if self.in_parts and any(other.is_parameter for other in old.relatives()):
                raise StageError(
                    f"{user_line()}: the step changes a parameter in place, and would do so once for each micro-batch; "
                    f"change it in on_train_batch_end, or set num_microbatches=1"
                )
            if old.is_state and at < self.read_up_to:
                raise StageError(
                    f"{user_line()}: a buffer of stage {at} is changed after a value of stage {self.read_up_to} was "
                    f"read, when stage {at} had left the step; change it before the read{_WHOLE}"
                )
            for other in old.relatives():
                other.holders = 1 << other.home
                if other.home != self.stage:
                    other.real = None
                if other is not old and other.home != at:
                    other.outdated_by = at  # its memory is another stage's copy of this one
        else:
            if self.is_absent(tensor, None):
                raise self.batch_needed("a change in place of its tensors by a stage")  # views of it are not known here
            self.touch("a tensor of the batch was changed")
        self.births += 1
        family = old.relatives() if old is not None and old.home == at else None
        new = Value(self, at, self.births, family=family, is_state=old is not None and old.is_state)
        new.written = True
        if old is None:
            self._written[storage_key(tensor)] = new, needs_gradient, storage_reserved(tensor)
        if self.stage == at and real is not None and real is not tensor:
            new.real = show(real, new)
            self._received.append(new)
        show(tensor, new)

    def keep_written(self) -> None:
        """For hooks to come: a tensor may have been written to through a view of it that is gone."""
        now = {key: (value.home, reserved) for key, (value, _, reserved) in self._written.items()}
        self.written_before.update(now)
        for key, (_, reserved) in list(self.written_before.items()):
            if not isinstance(reserved, torch.Tensor) and reserved.expired():  # type: ignore[attr-defined]
                del self.written_before[key]

    def release(self) -> None:
        """Lets go of what was received: a tensor and its value hold each other, which only a sweep would notice."""
        for value in self._received:
            value.real = None
        self._received.clear()

    def leave_if_done(self) -> None:
        if self.actions == self.last_action:
            raise LeaveStep

    def touch(self, what: str) -> None:
        """Tells the listeners that this rank did something."""
        self.actions += 1
        for listener in self.listeners:
            listener.touched(what)
