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
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from pl_pipe.errors import StageError
from pl_pipe.runtime.executor_settings import ExecutorSettings
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.runtime.mini_batch import MiniBatch, Step, Stepper, Update
from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.runtime.weight_versions import WeightVersions
from pl_pipe.schedule import ORDERS, Action, Kind

Listener: TypeAlias = Callable[[Kind | None, int, int, float], None]
"""(what, its mini-batch, the first one since the pipeline was last empty, when it began): called when it has ended.

None is the wait for an update's other replicas. Mini-batches are counted through the run; times are
`time.perf_counter`'s."""


@dataclass
class _Group:
    """The mini-batches that share an update."""

    mini_batches: int = 0
    """Those that ran here; other replicas have others."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of its backwards so far, by name, where weights are versioned; otherwise the parameters have them."""


@dataclass
class _InFlight:
    step: Step
    loss: Tensor | None
    version: int
    leaves: dict[str, Tensor] | None
    """The weights it runs with; None where those are the parameters themselves."""


@dataclass
class Executor:
    """Keeps mini-batches in flight, and their weights."""

    stepper: Stepper
    parameters: Mapping[str, nn.Parameter]
    """Those that this rank trains."""
    settings: ExecutorSettings
    numbers: StepNumbers
    """All ranks count alike, so that their messages meet."""
    averaging: GradientAveraging | None = None
    """Where the stage has replicas."""
    listen: Listener | None = None
    """Told of every forward, backward and update."""
    versions: WeightVersions = field(init=False)
    _in_flight: dict[int, _InFlight] = field(init=False, default_factory=dict)
    _groups: dict[int, _Group] = field(init=False, default_factory=dict)
    _earlier: int = field(init=False, default=0)
    """Mini-batches that had entered when the pipeline was last empty."""
    _arrived: int = field(init=False, default=0)
    """Mini-batches since."""
    _last_own: int = field(init=False, default=0)
    _updating: tuple[int, int, float] = field(init=False, default=(0, 0, 0.0))
    """The newest update, as it is told to `listen`: its last mini-batch here, and when it began."""

    def __post_init__(self) -> None:
        self.versions = WeightVersions(self.parameters)
        self._order = ORDERS[self.settings.schedule](
            self.settings.warmup, self.settings.update_every, self.settings.replicas
        )
        self._settings: dict[int, Any] = {}
        self._begin_segment()

    @property
    def arrived(self) -> int:
        """Mini-batches since the pipeline was last drained; the next one has this number, and its replicas' turn."""
        return self._arrived

    @property
    def entered(self) -> int:
        """Mini-batches so far."""
        return self._earlier + self._arrived

    @property
    def begins_anew(self) -> bool:
        """The next mini-batch enters a pipeline that is empty on all ranks, not only on this one."""
        return self._arrived == 0

    def takes_one_of(self, next_ones: int) -> bool:
        """Whether this replica runs any of the mini-batches that come next."""
        return any(self._is_own(number) for number in range(self._arrived, self._arrived + next_ones))

    def _is_own(self, number: int) -> bool:
        return number % self.settings.replicas == self.settings.place

    @property
    def is_drained(self) -> bool:
        """Nothing is in flight, and no gradient waits for others that will share its update."""
        return not self._in_flight and not self._groups

    def advance(self, mini_batches: Sequence[MiniBatch], settings: Callable[[], Any] = lambda: None) -> Update | None:
        """Lets mini-batches enter, and returns an update if one is due, to be applied before anything else is done.

        The mini-batches must lie within one update's share, so that no second one can be due. `settings` is asked when
        a mini-batch's step has run, which may have changed them.
        """
        due: Update | None = None
        if self._arrived == 0:
            self.numbers.begin_round()
        for mini_batch in mini_batches:
            number = self.numbers.trained()
            if self._is_own(self._arrived):
                for action in self._order.arrive(self._arrived):
                    self._act(action, mini_batch, number)
            else:
                with self.stepper.step(number, mini_batch.content, out_of_turn=True) as step:
                    mini_batch.run(step)
            self._note(settings)
            if self._complete is not None and self._arrived >= self.settings.all_complete(self._complete):
                if due is not None:
                    raise StageError(f"{len(mini_batches)} mini-batches made two updates due at once")
                due = self._gathered(self._complete)
            self._arrived += 1
        return due

    def drain(self) -> Iterator[Update]:
        """Finishes what is in flight; gives the updates one by one, also one that not all its mini-batches reached.

        Each must be applied before the next is asked for. The next mini-batch begins anew: on the newest weights, as
        the first one of a run. A replica without a mini-batch in the last update takes part in it all the same, since
        its weights must stay those of the others.
        """
        self._to_come = False
        if self._complete is not None:
            yield self._gathered(self._complete)
        for action in self._order.finish():
            self._act(action, None, None)
            if self._complete is not None:
                yield self._gathered(self._complete)
        for ordinal in sorted(self._settings):
            yield self._gathered(ordinal)
        self._begin_segment()

    def hand_over(self, update: Update) -> None:
        """Gives the parameters the update's gradients. They stay there until the next ones are computed."""
        for name, parameter in self.parameters.items():
            parameter.grad = update.gradients.get(name)

    def begin_update(self) -> None:
        """To be called before new weights are written: what is in flight keeps its own."""
        self._updating = *self._updating[:2], time.perf_counter()
        if self.settings.versioned:
            self.versions.begin_next(self._needed_versions())

    def end_update(self) -> None:
        """To be called when an update has been applied."""
        if self.listen is not None:
            self.listen(Kind.UPDATE, *self._updating)

    def _note(self, settings: Callable[[], Any]) -> None:
        """Keeps the settings for the update that the arriving mini-batch shares, unless another one has brought them,
        or this replica has made the update before the others' mini-batches of it come by."""
        ordinal = self._arrived // self.settings.update_every
        if ordinal >= self._updates and ordinal not in self._settings:
            self._settings[ordinal] = settings()

    def _begin_segment(self) -> None:
        self._earlier += self._arrived
        self._arrived = self._updates = 0
        self._complete: int | None = None
        """The update for which this replica has run all its mini-batches, and which waits for the others'."""
        self._base = self.versions.newest
        self._to_come = True

    def _act(self, action: Action, mini_batch: MiniBatch | None, number: int | None) -> None:
        start_s = time.perf_counter()
        self._do(action, mini_batch, number)
        if self.listen is not None and action.kind is not Kind.UPDATE:
            self.listen(action.kind, self._earlier + action.batch, self._earlier, start_s)

    def _do(self, action: Action, mini_batch: MiniBatch | None, number: int | None) -> None:
        if action.kind is Kind.FORWARD:
            assert mini_batch is not None
            assert number is not None
            self._forward(action.batch, mini_batch, number)
        elif action.kind is Kind.BACKWARD:
            self._backward(action.batch)
        else:
            self._complete = action.batch // self.settings.update_every
            self._last_own = action.batch

    def _forward(self, batch: int, mini_batch: MiniBatch, number: int) -> None:
        ordinal = batch // self.settings.update_every
        if ordinal not in self._groups:
            self._groups[ordinal] = _Group()
            if not self.settings.versioned:
                self._clear_gradients()
        self._groups[ordinal].mini_batches += 1
        version, leaves = self.versions.newest, None
        if self.settings.versioned:
            version = self._version_for(batch, self.versions.newest)
            leaves = self.versions.leaves(version)
        loss = None  # a rank may leave the step before it has one
        with self.stepper.step(number, mini_batch.content, parameters=leaves) as step:
            loss = mini_batch.run(step)
        if step.forget(mini_batch.run):
            loss = None
        self._in_flight[batch] = _InFlight(step, loss, version, leaves)

    def _backward(self, batch: int) -> None:
        waiting = self._in_flight.pop(batch)
        group = self._groups[batch // self.settings.update_every]
        leaves = waiting.leaves
        if leaves is not None:
            self._clear_gradients()
            for name, gradient in group.gradients.items():
                leaves[name].grad = gradient  # goes on adding up, whatever version the others had
        if self.averaging is not None and self.settings.ends_update(batch):
            self.averaging.watch(self.parameters if leaves is None else leaves)
        waiting.step.backward(waiting.loss)
        if leaves is not None:
            group.gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            self._refuse_weights_past_their_modules()

    def _version_for(self, number: int, newest: int) -> int:
        return self._base + self.settings.reading(number, newest - self._base)

    def _needed_versions(self) -> set[int]:
        """By what is in flight, and by what mini-batches to come will read after the next update."""
        needed = {waiting.version for waiting in self._in_flight.values()}
        if self._to_come:
            newest = self.versions.newest + 1
            needed.update(range(self._version_for(self._arrived, newest), newest))
        return needed

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _refuse_weights_past_their_modules(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                raise StageError(
                    f"the step uses {name} past its module (a reference kept elsewhere), where the weights of its own "
                    f"mini-batch cannot be put; use the module's attribute, or set schedule=1f1b"
                )

    def _gathered(self, ordinal: int) -> Update:
        """The update of a group, over all replicas; this one may have had no part in it."""
        group, self._complete = self._groups.pop(ordinal, _Group()), None
        last = self._last_own if group.mini_batches else self._arrived - 1
        self._updating = self._earlier + last, self._earlier, time.perf_counter()
        gradients = group.gradients
        if not self.settings.versioned and group.mini_batches:
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self._clear_gradients()
        if self.averaging is not None:
            trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
            gradients = self.averaging.finish(
                trained, gradients, mini_batches=group.mini_batches, averaged=self.settings.averaged
            )
            if self.listen is not None:
                self.listen(None, *self._updating)
        elif (mean := min(self.settings.averaged, group.mini_batches)) > 1:
            gradients = {name: gradient.div_(mean) for name, gradient in gradients.items()}
        self._updates = ordinal + 1
        return Update(gradients, self._settings.pop(ordinal))
