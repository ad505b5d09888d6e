"""One rank's pipelined model: steps with ghosts, several in flight. ownership, placement -> *Pipe* -> runtime.

    pipe = Pipe(model, ownership, stage=1, transport=transport)
    with pipe.step(number, batch) as step:
        loss = model.training_step(batch, number)
    ...                                             # other batches' forwards and backwards, if the schedule says so
    step.backward(loss)

All ranks must begin the same steps with the same numbers, and each must run its backwards in the order of its steps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from pl_pipe.comm import Transport, Wire
from pl_pipe.errors import StageError
from pl_pipe.stages.after_read import AfterRead
from pl_pipe.stages.exchange import BatchExchange
from pl_pipe.stages.habits import Habit, Habits
from pl_pipe.stages.kept_ghosts import holders_besides, kept_by_steps, settled, take_over, without_ghosts
from pl_pipe.stages.lockstep import LockstepExchange
from pl_pipe.stages.loss_counts import CallsNoted, FreeOperations, Site, TargetOf, loss_calls_heard
from pl_pipe.stages.ownership import Ownership
from pl_pipe.stages.parameter_swap import ParameterSwap
from pl_pipe.stages.pipe_step import IDLE, PipeStep, Run, RunAgain
from pl_pipe.stages.placement import place
from pl_pipe.stages.recomputation import Copying, RepeatedExchange, StepMemory
from pl_pipe.tensors.ghosts import (
    GhostStep,
    Inference,
    LeaveStep,
    home_of,
    outside_steps,
    route,
    settle,
    state_home,
    unroute,
    unsettle,
    value_of,
)
from pl_pipe.tensors.trees import map_tensors, tensors_in

_MOST_BYTES = 64 << 20  # of an attribute that is shared when nobody may want it
_SEEDS = 1_000_003  # a step's stream of common random numbers is told by seed and number


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
        replicated: bool = False,
    ) -> None:
        """Puts the other stages' parameters onto the meta device, so make optimizers afterwards.

        Args:
            announce: posts a batch's receives at its begin, once batches of its signature have done the same twice.
            leave_early: leaves the user's step after this rank's last operation, once that is known. For steps that do
                the same for every batch of one signature, and nothing afterwards that this rank needs.
            wire_dtype: what wider activations and gradients are rounded to on their way.
            recompute: a step of which `PipeStep.forget` is asked keeps only what it began with, and runs again for its
                backward. Not on the last stage, where that follows at once.
            replicated: some stage has several ranks, of which one has the batch.
        """
        if not IDLE <= stage < ownership.stages:
            raise StageError(f"stage {stage} of a model with {ownership.stages} stages")
        self.model = model
        self.ownership = ownership
        self.stage = stage
        self.batch_is_here = True
        """Otherwise steps are given tensors on the meta device as their batch."""
        self.shared_settings: Callable[[], Mapping[str, Any]] = dict
        """By their names, what a step may set besides attributes, alike on all ranks: an optimizer's rates."""
        self.whole_batches = False
        """A batch enters when the one before has been applied, so that no rank could run ahead."""
        self.in_parts = False
        """Batches are divided, and the step runs once for each part."""
        self.has_left = False
        """Since ranks of earlier stages were last told, a step has read a value, at which they left it."""
        self._results: set[tuple[nn.Module, str]] = set()
        """What steps have kept of values that they read."""
        self._evaluated: set[tuple[nn.Module, str]] = set()
        """The same of an evaluation, in which one rank of a stage has all batches."""
        self._replicated = replicated
        self._transport = transport
        self._device = torch.device(device)
        self._seed = seed
        self._announce = announce
        self._leave_early = leave_early
        self._wire = Wire(wire_dtype)
        self._recompute = recompute and 0 <= stage < ownership.stages - 1
        self._copying = Copying()
        self._inference = Inference(self._device)
        self._habits = Habits()
        self._model_states: dict[Any, int] = {}
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]
        places = ownership.places(model, stage)
        self.exchanged = place(model, ownership, stage)
        """Parameters of other stages, and what has taken their place."""
        route(places)
        self._modules = list(model.modules())
        self._shared_modules = [module for module, own in places.items() if own.owner is None or module is model]
        """Those whose Python every rank runs."""
        self._parameters = list(model.parameters())
        self._written_by_hooks: dict[int, tuple[int, object]] = {}
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
        # In evaluation nothing is lost but that stages run ahead of a step that reads; in training that is too much.
        trains = torch.is_grad_enabled()
        ghosts.both_ways = (self.whole_batches or not trains) and not self._replicated
        ghosts.gradients_go_back, ghosts.in_parts = not trains, self.in_parts and trains
        if out_of_turn:
            step = PipeStep(ghosts, exchange, Habit())
            with self._own_tensors_kept(others_change=True), self._running(step, ghosts, None):
                yield step
            return
        habit = self._habits.of(batch, state, ghosts.modes)
        memory = None
        if self._recompute and torch.is_grad_enabled():
            memory = StepMemory(self._modules, batch, self._copying, model_state=state, is_first=not habit.recomputed)
            exchange.keeper = memory
        if habit.repeated and self._announce and not self.whole_batches:
            exchange.announce(habit.arrivals)
        if habit.repeated and self._leave_early and not habit.has_loss:
            ghosts.last_action = habit.actions
        step = PipeStep(ghosts, exchange, habit)
        after_read = None
        if trains or self._replicated:
            after_read = AfterRead(self._shared_modules, self.shared_settings)
            ghosts.parting, ghosts.others_idle = after_read.note, self._replicated
        with self._running(step, ghosts, parameters):
            yield step
        self.has_left = self.has_left or ghosts.read_up_to > 0
        if after_read is not None and trains:
            self._results |= after_read.check(ghosts.read, up_to=ghosts.read_up_to)
        elif after_read is not None and not step.left:
            self._evaluated |= after_read.results()
        self._look_for_kept_batch(ghosts)
        habit.note(exchange.arrivals, ghosts.actions, fixed=not ghosts.value_dependent)
        if memory is not None:
            step._forget = partial(self._forgotten, number, habit, memory, parameters, ghosts.last_action)

    def share_kept(
        self, others: Mapping[str, Any], everyone: Callable[[Any], Sequence[Any]], *, most_bytes: int | None = None
    ) -> None:
        """What steps have kept of values and of numbers that they read is on all ranks afterwards.

        Args:
            others: what may keep such besides the model's modules, by a name that is alike on all ranks.
            everyone: gives what all ranks have to say, in their order.
            most_bytes: attributes of the model's modules with more stay as they are.
        """
        names = {module: name for name, module in self.model.named_modules()}
        modules = {name: module for module, name in names.items()}
        besides = {**others, **holders_besides({**modules, **others}, names)}
        owners: dict[str, Any] = {**modules, **besides}
        results, evaluated = self._told(names, self._results), self._told(names, self._evaluated)
        is_last = self.stage == self.ownership.stages - 1
        written = self._written_by_hooks
        kept = kept_by_steps(modules, self.stage, written, most_bytes=most_bytes)
        kept |= kept_by_steps(besides, self.stage, written)
        own = (is_last, results, evaluated, kept)
        self.has_left, self._results, self._evaluated = False, set(), set()
        for from_last, found, by_one, kept in everyone(own):
            if from_last:
                taken = ({} if is_last else found) | {key: by_one[key] for key in by_one.keys() - evaluated.keys()}
                for (name, attribute), value in taken.items():
                    vars(owners[name])[attribute] = value
            take_over(owners, kept, self._device, written)

    def _told(self, names: Mapping[nn.Module, str], attributes: Iterable[tuple[nn.Module, str]]) -> dict[Any, Any]:
        """Their values, as other ranks can be given them."""
        values = {(names[module], name): vars(module).get(name) for module, name in attributes}
        for tensor in tensors_in(values):
            unsettle(tensor)  # all will have it
        told: dict[Any, Any] = map_tensors(values, lambda tensor: tensor.detach().cpu())
        return told

    @contextmanager
    def lockstep(
        self, number: int, gradients_shown: Callable[[], None], *, draws: AbstractContextManager[Any]
    ) -> Iterator[PipeStep]:
        """Runs a step that runs backward itself, and may use its optimizers in between; see `pl_pipe.stages.lockstep`.

        Random numbers that every rank draws are drawn within `draws`. `PipeStep.again` enters it once more, for a
        backward after its end. After each backward `gradients_shown` is called, outside of the step.
        """
        exchange = LockstepExchange(
            self._transport, stage=self.stage, batch=number, device=self._device, wire=self._wire
        )
        ghosts = self._ghost_step(self.stage, number, exchange, self._model_state())
        ghosts.both_ways, ghosts.look_at_model, ghosts.draws = True, self._model_state, draws

        def run_backward(loss: Tensor | None, gradient: Tensor | None, *, retain_graph: bool) -> None:
            with outside_steps():
                exchange.run_backward(loss, gradient, retain_graph=retain_graph)
                gradients_shown()

        ghosts.run_backward = run_backward
        step = PipeStep(ghosts, exchange, Habit())
        with ghosts:
            yield step

    def show_gradients(self, all_have: Callable[[list[bool]], list[bool]]) -> None:
        """Parameters of other stages have gradients from now on, where theirs have; `all_have` asks all ranks."""
        own = [state_home(parameter) == self.stage for parameter in self._parameters]
        has = all_have([mine and p.grad is not None for mine, p in zip(own, self._parameters, strict=True)])
        for parameter, known in zip(self._parameters, has, strict=True):
            if known and parameter.is_meta:
                parameter.grad = torch.empty_like(parameter)
            if known and parameter.grad is not None and state_home(parameter) is not None:
                settle(parameter.grad, cast(int, state_home(parameter)))

    def hide_gradients(self) -> None:
        for parameter in self._parameters:
            if parameter.is_meta:
                parameter.grad = None
            elif parameter.grad is not None:
                unsettle(parameter.grad)

    @contextmanager
    def hook(self, number: int, *, draws: AbstractContextManager[Any] | None = None) -> Iterator[PipeStep]:
        """Runs a hook of the user's that may look at any part of the model, and at what steps have kept, on all ranks.

        Numbers that Python reads come to every rank, wherever they are; no gradients flow. Within `draws`, random
        numbers are alike on all ranks.
        """
        exchange = BatchExchange(self._transport, stage=self.stage, batch=number, device=self._device, wire=self._wire)
        exchange.has_backward = False
        ghosts = self._ghost_step(self.stage, number, exchange, self._model_state())
        ghosts.is_hook, ghosts.both_ways, ghosts.others_idle = True, True, self._replicated
        ghosts.draws, ghosts.written_before = draws, self._written_by_hooks
        step = PipeStep(ghosts, exchange, Habit())
        try:
            with self._running(step, ghosts, None):
                yield step
        finally:
            ghosts.keep_written()
            ghosts.release()

    def stages_needing_batch(self, run: Callable[[PipeStep], Any]) -> frozenset[int]:
        """The stages that compute with tensors of the batch when `run` runs the user's step on one.

        Nothing is computed and nothing sent: the batch's tensors are to be on the meta device. Raises BatchNeededError
        where every stage needs to have it, because Python, or a shape, depends on the numbers.
        """
        exchange = BatchExchange(self._transport, stage=IDLE, batch=0, device=self._device, wire=self._wire)
        ghosts = self._ghost_step(IDLE, 0, exchange, self._model_state(), batch_is_here=False)
        step = PipeStep(ghosts, exchange, Habit())
        with self._own_tensors_kept():
            with self._running(step, ghosts, None):
                run(step)
            self._look_for_kept_batch(ghosts)
        unseen = range(ghosts.read_up_to, self.ownership.stages) if step.left else ()  # only those go on after a read
        return frozenset(ghosts.needed_at.union(unseen))

    def loss_calls(self, batch: Any, run: Callable[[PipeStep], Any]) -> Mapping[Site, TargetOf]:
        """The losses that divide by a number of targets, in the user's step on a batch of this kind.

        Nothing is computed but what follows from the batch alone, and nothing is sent.
        """
        exchange = BatchExchange(self._transport, stage=IDLE, batch=0, device=self._device, wire=self._wire)
        ghosts = self._ghost_step(IDLE, 0, exchange, self._model_state())
        operations = FreeOperations(batch)
        ghosts.note_free, ghosts.repeats = operations.note, False
        noted = CallsNoted(operations)
        step = PipeStep(ghosts, exchange, Habit())
        with self._own_tensors_kept(), self._running(step, ghosts, None), loss_calls_heard(noted):
            run(step)
        return noted.calls

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
        habit: Habit,
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

    def forget_ghosts(self, others: Mapping[str, Any], everyone: Callable[[Any], Sequence[Any]]) -> None:
        """Attributes in which steps have kept values of other stages get the numbers. The rest (a mask, a table that a
        module makes once) stand as before the run, so that the model makes them anew when it is whole again."""
        self.share_kept(others, everyone, most_bytes=_MOST_BYTES)
        for module, attributes in self._attributes:
            without_ghosts(vars(module), attributes)
            settled(vars(module))

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
    def _own_tensors_kept(self, *, others_change: bool = False) -> Iterator[None]:
        """A module that sets a buffer, or keeps a tensor it has made, would keep a ghost instead of numbers.

        What it counts or sets besides stays, so that ranks go on alike; and where `others_change`, so do the ghosts of
        buffers that have become another stage's.
        """
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in self._modules]
        try:
            yield
        finally:
            for module, attributes, buffers in before:
                moved = {name for name in buffers if others_change and self._has_moved(module, name, buffers[name])}
                module._buffers.update({name: buffers[name] for name in buffers if name not in moved})
                without_ghosts(vars(module), attributes)

    def _has_moved(self, module: nn.Module, name: str, before: Tensor | None) -> bool:
        """Whether the step assigned a buffer anew, from values of another stage than had it."""
        now = module._buffers.get(name)
        home = None if now is None else home_of(now)
        if home is None or before is None or home == home_of(before):
            return False
        if home == self.stage:
            raise StageError(
                f"buffer {name} of {type(module).__name__} is assigned from values of stage {self.stage}, which has "
                f"several ranks, so each would have one of its own batches; plan stage {self.stage} onto one device"
            )
        return True

    def _model_state(self) -> int:
        """A number for the model's training flags and frozen parameters."""
        flags = tuple([module.training for module in self._modules])
        frozen = tuple([parameter.requires_grad for parameter in self._parameters])
        return self._model_states.setdefault((flags, frozen), len(self._model_states))
