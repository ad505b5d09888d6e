"""Runs one rank's part of a schedule on mini-batches as they come. schedule -> *Executor* -> Pipe, WeightVersions.

The orders of `schedule` say when this rank does a forward, a backward or an update. Sends and receives follow from the
forwards and backwards themselves: values travel as soon as they are computed, so they need no actions here.

    update = executor.advance([mini_batch, …])   forwards of these and backwards that are due; at most one update
    executor.hand_over(update)                   the parameters have its gradients
    executor.begin_update(); optimizer.step()    what is in flight keeps the weights it began with
    for update in executor.drain(): …            until nothing is in flight
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch import Tensor, nn

from pl_pipe.errors import StageError
from pl_pipe.runtime.weight_versions import WeightVersions
from pl_pipe.schedule import ORDERS, Action, Kind, Reading

Listener: TypeAlias = Callable[[Kind, int, int, float], None]
"""(what, its mini-batch, the first one since the pipeline was last empty, when it began): called when it has ended.

Mini-batches are counted through the run; times are `time.perf_counter`'s."""


class Step(Protocol):
    """A mini-batch between its forward and its backward."""

    def backward(self, loss: Tensor | None = None) -> None: ...


class Stepper(Protocol):
    """What runs a mini-batch's step on this rank: a Pipe, or the whole model."""

    def step(
        self, number: int, batch: Any = None, *, parameters: Mapping[str, Tensor] | None = None
    ) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class MiniBatch:
    """What enters the pipeline at once."""

    content: Any
    """What its step is called with; shapes in it tell which mini-batches do the same."""
    run: Callable[[Any], Tensor | None]
    """Runs the user's step, given the PipeStep, and returns the loss (or its ghost) times its share in the update."""


@dataclass
class Update:
    """Gradients that are ready to be applied."""

    gradients: dict[str, Tensor]
    """By name; parameters that had no part in it are absent."""
    settings: Any
    """What was given to `advance` with the last mini-batch that shares the update."""

    def joined_by(self, later: "Update") -> "Update":
        """Both as one, with the later one's settings."""
        gradients = dict(self.gradients)
        for name, gradient in later.gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return Update(gradients, later.settings)


@dataclass
class _Group:
    """The mini-batches that share an update."""

    version: int
    leaves: dict[str, Tensor] | None
    """The weights they see; None where those are the parameters themselves."""
    settings: Any = None


@dataclass
class _InFlight:
    step: Step
    loss: Tensor | None


@dataclass(frozen=True)
class ExecutorSettings:
    """One rank's part of a schedule."""

    schedule: str
    warmup: int
    update_every: int
    """Mini-batches that share an update."""
    reading: Reading
    versioned: bool
    """Whether an update may come between a mini-batch's forward and its backward, or a forward reads older weights."""


@dataclass
class Executor:
    """Keeps mini-batches in flight, and their weights."""

    stepper: Stepper
    parameters: Mapping[str, nn.Parameter]
    """Those that this rank trains."""
    settings: ExecutorSettings
    count_step: Callable[[], int]
    """The number of the next step; all ranks count alike, so that their messages meet."""
    listen: Listener | None = None
    """Told of every forward, backward and update."""
    versions: WeightVersions = field(init=False)
    _in_flight: dict[int, _InFlight] = field(init=False, default_factory=dict)
    _groups: dict[int, _Group] = field(init=False, default_factory=dict)
    _earlier: int = field(init=False, default=0)
    """Mini-batches that had entered when the pipeline was last empty."""
    _arrived: int = field(init=False, default=0)
    """Mini-batches since."""
    _updating: tuple[int, int] = field(init=False, default=(0, 0))
    """The last mini-batch of the newest update, as it is told to `listen`."""

    def __post_init__(self) -> None:
        self.versions = WeightVersions(self.parameters)
        self._order = ORDERS[self.settings.schedule](self.settings.warmup, self.settings.update_every, 1)
        self._begin_segment()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def entered(self) -> int:
        """Mini-batches so far."""
        return self._earlier + self._arrived

    @property
    def begins_anew(self) -> bool:
        """The next mini-batch enters a pipeline that is empty on all ranks, not only on this one."""
        return self._arrived == 0

    @property
    def is_drained(self) -> bool:
        """Nothing is in flight, and no gradient waits for others that will share its update."""
        return not self._in_flight and not self._groups

    def advance(self, mini_batches: Sequence[MiniBatch], settings: Any = None) -> Update | None:
        """Lets mini-batches enter, and returns an update if one is due, to be applied before anything else is done.

        The mini-batches must lie within one update's share, so that no second one can be due.
        """
        due: Update | None = None
        for mini_batch in mini_batches:
            for action in self._order.arrive(self._arrived):
                update = self._act(action, mini_batch, settings)
                if update is not None and due is not None:
                    raise StageError(f"{len(mini_batches)} mini-batches made two updates due at once")
                due = update or due
            self._arrived += 1
        return due

    def drain(self) -> Iterator[Update]:
        """Finishes what is in flight; gives the updates one by one, also one that not all its mini-batches reached.

        Each must be applied before the next is asked for. The next mini-batch begins anew: on the newest weights, as
        the first one of a run.
        """
        self._to_come = False
        for action in self._order.finish():
            update = self._act(action, None, None)
            if update is not None:
                yield update
        self._begin_segment()

    def hand_over(self, update: Update) -> None:
        """Gives the parameters the update's gradients. They stay there until the next ones are computed."""
        for name, parameter in self.parameters.items():
            parameter.grad = update.gradients.get(name)

    def begin_update(self) -> None:
        """To be called before new weights are written: what is in flight keeps its own."""
        if self.settings.versioned:
            self.versions.begin_next(self._needed_versions())

    def end_update(self, start_s: float) -> None:
        """To be called when the newest update has been applied, with the time at which that began."""
        if self.listen is not None:
            self.listen(Kind.UPDATE, *self._updating, start_s)

    def _begin_segment(self) -> None:
        self._earlier += self._arrived
        self._arrived = 0
        self._base = self.versions.newest
        self._to_come = True

    def _act(self, action: Action, mini_batch: MiniBatch | None, settings: Any) -> Update | None:
        start_s = time.perf_counter()
        update = self._do(action, mini_batch, settings)
        place = self._earlier + action.batch, self._earlier
        if action.kind is Kind.UPDATE:
            self._updating = place
        elif self.listen is not None:
            self.listen(action.kind, *place, start_s)
        return update

    def _do(self, action: Action, mini_batch: MiniBatch | None, settings: Any) -> Update | None:
        if action.kind is Kind.FORWARD:
            assert mini_batch is not None
            self._forward(action.batch, mini_batch, settings)
        elif action.kind is Kind.BACKWARD:
            waiting = self._in_flight.pop(action.batch)
            if self.settings.versioned:
                self._clear_gradients()
            waiting.step.backward(waiting.loss)
        else:
            return self._gathered(self._groups.pop(action.batch // self.settings.update_every))
        return None

    def _forward(self, number: int, mini_batch: MiniBatch, settings: Any) -> None:
        ordinal = number // self.settings.update_every
        if ordinal not in self._groups:
            self._groups[ordinal] = self._new_group(number)
        group = self._groups[ordinal]
        group.settings = settings
        loss = None  # a rank may leave the step before it has one
        with self.stepper.step(self.count_step(), mini_batch.content, parameters=group.leaves) as step:
            loss = mini_batch.run(step)
        self._in_flight[number] = _InFlight(step, loss)

    def _new_group(self, number: int) -> _Group:
        if not self.settings.versioned:
            self._clear_gradients()
            return _Group(self.versions.newest, None)
        version = self._version_for(number, self.versions.newest)
        return _Group(version, self.versions.leaves(version))

    def _version_for(self, number: int, newest: int) -> int:
        return self._base + self.settings.reading(number, newest - self._base)

    def _needed_versions(self) -> set[int]:
        """By what is in flight, and by what mini-batches to come will read after the next update."""
        needed = {group.version for group in self._groups.values()}
        if self._to_come:
            newest = self.versions.newest + 1
            needed.update(range(self._version_for(self._arrived, newest), newest))
        return needed

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _gathered(self, group: _Group) -> Update:
        gradients: dict[str, Tensor] = {}
        sources: Mapping[str, Tensor] = self.parameters if group.leaves is None else group.leaves
        for name, source in sources.items():
            if source.grad is not None:
                gradients[name] = source.grad
                source.grad = None
        if group.leaves is not None:
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    raise StageError(
                        f"the step uses {name} past its module (a reference kept elsewhere), where the weights of its "
                        f"own mini-batch cannot be put; use the module's attribute, or set schedule=1f1b"
                    )
        return Update(gradients, group.settings)
