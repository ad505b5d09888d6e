"""One rank's pipelined model: steps with ghosts, several in flight. ownership, placement -> *Pipe* -> runtime.

    pipe = Pipe(model, ownership, stage=1, transport=transport)
    with pipe.step(number, batch) as step:
        loss = model.training_step(batch, number)
    ...                                             # other batches' forwards and backwards, if the schedule says so
    step.backward(loss)

All ranks must begin the same steps with the same numbers, and each must run its backwards in the order of its steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pl_pipe.comm import Message, Transport, Wire
from pl_pipe.errors import StageError
from pl_pipe.stages.exchange import BatchExchange
from pl_pipe.stages.ownership import Ownership
from pl_pipe.stages.parameter_swap import ParameterSwap
from pl_pipe.stages.placement import place
from pl_pipe.stages.recomputation import Copying, RepeatedExchange, StepMemory
from pl_pipe.tensors.ghosts import (
    GhostStep,
    Inference,
    LeaveStep,
    TensorSpec,
    route,
    settle,
    state_home,
    unroute,
    value_of,
)
from pl_pipe.tensors.ghosts.specs import hashable, scan
from pl_pipe.tensors.interception import taken_off

IDLE = -1
"""The stage of a rank that owns nothing: it runs every step for its Python alone, and has no part in any transfer."""

_HABITS = 256  # signatures remembered; beyond that, batches are too different to learn from
_SEEDS = 1_000_003  # a step's stream of common random numbers is told by seed and number


@dataclass
class _Habit:
    """What the steps of one signature did on this rank, and whether they always do."""

    arrivals: list[tuple[Message, TensorSpec]] = field(default_factory=list)
    actions: int = -1
    repeated: bool = False
    has_loss: bool = False
    recomputed: bool = False
    """A step was run again, and did the same."""

    def note(self, arrivals: list[tuple[Message, TensorSpec]], actions: int, *, fixed: bool) -> None:
        alike = [(message._replace(batch=0), spec) for message, spec in arrivals]
        self.repeated = fixed and alike == self.arrivals and actions == self.actions
        self.arrivals, self.actions = alike, actions


Run: TypeAlias = Callable[[Any], Tensor | None]
"""The user's step, given the PipeStep; returns the loss."""
RunAgain: TypeAlias = Callable[[], "tuple[PipeStep, Tensor | None]"]


class PipeStep:
    """A batch on its way: from the step's begin to its backward."""

    def __init__(
        self, ghosts: GhostStep, exchange: BatchExchange, habit: _Habit, *, is_repetition: bool = False
    ) -> None:
        self.is_repetition = is_repetition
        """The step runs again for its backward; what it logs has been heard."""
        self.out_of_turn = ghosts.stage == IDLE
        """This rank has no part in the batch."""
        self.left = False
        """This rank left the user's step before its end, having nothing left to do in it."""
        self._ghosts = ghosts
        self._exchange = exchange
        self._habit = habit
        self._forget: Callable[[Run], RunAgain | None] = lambda _: None
        self._run_again: RunAgain | None = None

    def forget(self, run: Run) -> bool:
        """Lets go of what `run`, the user's step, can compute again for backward; false where it must be kept."""
        self._run_again = self._forget(run)
        if self._run_again is not None:
            self._exchange.forget()
            self._ghosts.release()
        return self._run_again is not None

    def bring(self, tensor: Tensor) -> Tensor:
        """Has the tensor's numbers sent to the last stage, where this returns them; elsewhere it returns a ghost.

        For what is to be shown to people: no gradient comes back. Every rank must ask, at the same place in the step.
        """
        detached = tensor.detach()
        with taken_off(self._ghosts):
            value = self._ghosts.value(detached)
            if value is not None:
                self._ghosts.move(detached, value, self._ghosts.stages - 1, exact=True)
            return self._ghosts.here(detached)

    def at_last(self, tensor: Tensor) -> Tensor:
        """The tensor as a value of the last stage: itself where it is computed there, and otherwise brought there."""
        ghosts, last = self._ghosts, self._ghosts.stages - 1
        with taken_off(ghosts):
            value = ghosts.value(tensor)
            if ghosts.is_absent(tensor, value):
                return ghosts.new_ghost(TensorSpec.of(tensor), last)
        if value is None or value.home == last:
            return tensor
        brought = self.bring(tensor)
        with taken_off(ghosts):
            brought = brought.detach()
            return (
                ghosts.show(brought, last) if ghosts.stage == last else ghosts.new_ghost(TensorSpec.of(brought), last)
            )

    def of_last(self, call: Callable[[], Any]) -> Any:
        """What a call returns that computes on values of the last stage, and that no other rank needs.

        A rank without the batch takes part in it with ghosts; where numbers are read, it skips the rest.
        """
        ghosts = self._ghosts
        if ghosts.batch_is_here:
            return call()
        read_up_to = ghosts.read_up_to
        try:
            return call()
        except LeaveStep:
            return ghosts.new_ghost(TensorSpec((), (), torch.get_default_dtype(), False), ghosts.stages - 1)
        finally:
            ghosts.read_up_to = read_up_to

    def backward(self, loss: Tensor | None = None) -> None:
        """This rank's part of the batch's backward. `loss` is what the step returned: None, or a ghost, elsewhere."""
        if self._run_again is not None:
            step, loss = self._run_again()
            step.backward(loss)
            return
        value = None if loss is None else value_of(loss)
        is_root = value is not None and value.home == self._ghosts.stage and loss is not None and loss.requires_grad
        if is_root:
            self._habit.has_loss = True
        self._exchange.backward(loss if is_root else None)
        self._ghosts.release()


class Pipe:
    """A model of which this rank computes one stage."""

    def __init__(
        self,
        model: nn.Module,
        ownership: Ownership,
        *,
        stage: int,
        transport: Transport,
        device: torch.device | str = "cpu",
        seed: int = 0,
        announce: bool = True,
        leave_early: bool = False,
        wire_dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        """Puts the other stages' parameters onto the meta device, so make optimizers afterwards.

        Args:
            announce: posts a batch's receives at its begin, once batches of its signature have done the same twice.
            leave_early: leaves the user's step after this rank's last operation, once that is known. For steps that do
                the same for every batch of one signature, and nothing afterwards that this rank needs.
            wire_dtype: what wider activations and gradients are rounded to on their way.
            recompute: a step of which `PipeStep.forget` is asked keeps only what it began with, and runs again for its
                backward. Not on the last stage, where that follows at once.
        """
        if not IDLE <= stage < ownership.stages:
            raise StageError(f"stage {stage} of a model with {ownership.stages} stages")
        self.model = model
        self.ownership = ownership
        self.stage = stage
        self.batch_is_here = True
        """Otherwise steps are given tensors on the meta device as their batch."""
        self._transport = transport
        self._device = torch.device(device)
        self._seed = seed
        self._announce = announce
        self._leave_early = leave_early
        self._wire = Wire(wire_dtype)
        self._recompute = recompute and 0 <= stage < ownership.stages - 1
        self._copying = Copying()
        self._inference = Inference(self._device)
        self._habits: dict[Any, _Habit] = {}
        self._model_states: dict[Any, int] = {}
        places = ownership.places(model, stage)
        place(model, ownership, stage)
        route(places)
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._swap = ParameterSwap(model)

    def own_named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that this rank trains, in the model's order."""
        homes = self.ownership.homes
        return [(name, p) for name, p in self.model.named_parameters() if homes.get(name) == self.stage]

    @contextmanager
    def step(
        self,
        number: int,
        batch: Any = None,
        *,
        parameters: Mapping[str, Tensor] | None = None,
        out_of_turn: bool = False,
    ) -> Iterator[PipeStep]:
        """Runs the user's step on batch `number`.

        Args:
            batch: what the step is called with. Its shapes tell which batches do the same.
            parameters: an older version of this rank's parameters to run with, by name; gradients go to these tensors.
            out_of_turn: another replica of this stage has the batch. The step runs for its Python alone, so that what
                it counts or sets on the way is alike on all ranks.
        """
        stage = IDLE if out_of_turn else self.stage
        exchange = BatchExchange(self._transport, stage=stage, batch=number, device=self._device, wire=self._wire)
        state = self._model_state()
        ghosts = self._ghost_step(stage, number, exchange, state)
        if out_of_turn:
            step = PipeStep(ghosts, exchange, _Habit())
            with self._buffers_kept(), self._running(step, ghosts, None):
                yield step
            return
        habit = self._habit(batch, state, ghosts.modes)
        memory = None
        if self._recompute and torch.is_grad_enabled():
            memory = StepMemory(self._modules, batch, self._copying, model_state=state, is_first=not habit.recomputed)
            exchange.keeper = memory
        if habit.repeated and self._announce:
            exchange.announce(habit.arrivals)
        if habit.repeated and self._leave_early and not habit.has_loss:
            ghosts.last_action = habit.actions
        step = PipeStep(ghosts, exchange, habit)
        with self._running(step, ghosts, parameters):
            yield step
        self._look_for_kept_batch(ghosts)
        habit.note(exchange.arrivals, ghosts.actions, fixed=not ghosts.value_dependent)
        if memory is not None:
            step._forget = partial(self._forgotten, number, habit, memory, parameters, ghosts.last_action)

    def stages_needing_batch(self, run: Callable[[PipeStep], Any]) -> frozenset[int]:
        """The stages that compute with tensors of the batch when `run` runs the user's step on one.

        Nothing is computed and nothing sent: the batch's tensors are to be on the meta device. Raises BatchNeededError
        where every stage needs to have it, because Python, or a shape, depends on the numbers.
        """
        exchange = BatchExchange(self._transport, stage=IDLE, batch=0, device=self._device, wire=self._wire)
        ghosts = self._ghost_step(IDLE, 0, exchange, self._model_state(), batch_is_here=False)
        step = PipeStep(ghosts, exchange, _Habit())
        with self._buffers_kept():
            with self._running(step, ghosts, None):
                run(step)
            self._look_for_kept_batch(ghosts)
        unseen = range(ghosts.read_up_to, self.ownership.stages) if step.left else ()  # only those go on after a read
        return frozenset(ghosts.needed_at.union(unseen))

    def _look_for_kept_batch(self, ghosts: GhostStep) -> None:
        """A buffer that the step filled with what follows from the batch is its stage's to know."""
        if ghosts.batch_is_here:
            return
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta and value_of(buffer) is None and state_home(buffer) is None:
                ghosts.need_batch(self.ownership.homes.get(name, self.stage), f"buffer {name}")

    @contextmanager
    def _running(self, step: PipeStep, ghosts: GhostStep, parameters: Mapping[str, Tensor] | None) -> Iterator[None]:
        with ExitStack() as stack:
            if parameters is not None:
                stack.enter_context(self._with_version(parameters))
            try:
                with ghosts:
                    yield
            except LeaveStep:
                step.left = True

    def _ghost_step(
        self, stage: int, number: int, exchange: BatchExchange, state: int, *, batch_is_here: bool | None = None
    ) -> GhostStep:
        return GhostStep(
            stage=stage,
            stages=self.ownership.stages,
            device=self._device,
            inference=self._inference,
            exchange=exchange,
            seed=self._seed * _SEEDS + number,
            model_state=state,
            batch_is_here=self.batch_is_here if batch_is_here is None else batch_is_here,
        )

    def _forgotten(
        self,
        number: int,
        habit: _Habit,
        memory: StepMemory,
        parameters: Mapping[str, Tensor] | None,
        last_action: int | None,
        run: Run,
    ) -> RunAgain | None:
        """What runs a step again that has ended."""
        if not memory.suffices():
            return None

        def again() -> tuple[PipeStep, Tensor | None]:
            if self._model_state() != memory.model_state:
                raise StageError(
                    f"training flags or frozen parameters changed between forward and backward of step {number}, which "
                    f"has to run again as it did; change them between epochs, or set recompute=false"
                )
            exchange = RepeatedExchange(
                self._transport, stage=self.stage, batch=number, device=self._device, wire=self._wire, memory=memory
            )
            ghosts = self._ghost_step(self.stage, number, exchange, memory.model_state)
            ghosts.last_action = last_action
            step, loss = PipeStep(ghosts, exchange, habit, is_repetition=True), None
            as_at_first = memory.put_back()
            with torch.inference_mode(False), torch.enable_grad(), as_at_first, self._running(step, ghosts, parameters):
                loss = run(step)
            habit.recomputed = True
            return step, loss

        return again

    def close(self) -> None:
        """The model's forwards are its own again; its parameters stay where they are (see `restore`)."""
        unroute(self.model)

    def __enter__(self) -> "Pipe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _with_version(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        for name, tensor in parameters.items():
            if self.ownership.homes.get(name) != self.stage:
                raise StageError(
                    f"a version of {name} is given to stage {self.stage}, but its home is stage "
                    f"{self.ownership.homes.get(name)}; give own_named_parameters only"
                )
            settle(tensor, self.stage)
        with self._swap.using(parameters):
            yield

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """A module that puts another tensor in a buffer's place would put a ghost over this rank's numbers."""
        before = [(module, dict(module._buffers)) for module in self._modules if module._buffers]
        try:
            yield
        finally:
            for module, buffers in before:
                module._buffers.update(buffers)

    def _model_state(self) -> int:
        """A number for the model's training flags and frozen parameters."""
        flags = tuple([module.training for module in self._modules])
        frozen = tuple([parameter.requires_grad for parameter in self._parameters])
        return self._model_states.setdefault((flags, frozen), len(self._model_states))

    def _habit(self, batch: Any, state: int, modes: Any) -> _Habit:
        tensors: list[Tensor] = []
        structure = _without_texts(scan(batch, tensors))
        key = (structure, tuple(TensorSpec.of(tensor) for tensor in tensors), state, modes)
        if batch is None or structure is None or not hashable(key):
            return _Habit()
        if len(self._habits) >= _HABITS and key not in self._habits:
            self._habits.clear()
        return self._habits.setdefault(key, _Habit())


def _without_texts(structure: Any) -> Any:
    """The structure of a batch without its texts and floats, which differ from batch to batch and change no shape.

    None where it holds an object that is no container: nobody knows what such a thing does.
    """
    if isinstance(structure, tuple):
        if len(structure) == 2 and structure[0] in (str, bytes, float, type(None)):
            return structure[0]
        parts = tuple(_without_texts(part) for part in structure)
        return None if None in parts else parts
    return structure if isinstance(structure, str | int | type) else None
