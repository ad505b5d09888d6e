"""Steps that were recorded once and are computed again without their Python. batch -> *replay* -> gradients, logs.

    first step     runs as ever, and is written down: operations, logs, calls of metrics (unless it has been for others)
    second step    operations are compiled, if asked for, and captured as one CUDA graph
    from then on   batch copied in ─► graph replayed ─► gradients put in place, logs said, metrics called

`branches` are the variants' own steps on streams of their own, `captured array` is the array's; compiled, both have
kernels made for them. What they cannot do (another shape of batch, such as the last) is left to another formulation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.fusion import Chooser, FusionReport, VariantArray
from pl_pipe.fusion.replay import Branch, Capture, captured, warm_up
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.choosing_threads import ChoosingThread, Made, quickest_thread
from pl_pipe.strategies.fusion.recorded_parts import ArrayPart, VariantPart
from pl_pipe.strategies.fusion.recorded_step import RecordedStep
from pl_pipe.strategies.fusion.replayed_inputs import ReplayedInputs, recording_key, refuse_other_tensors
from pl_pipe.strategies.fusion.replayed_optimizers import CAPTURES, ReplayedOptimizers
from pl_pipe.strategies.fusion.replayed_values import ReplayedValues
from pl_pipe.strategies.fusion.shared_part import SharedPart
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall, StepFormulation, detached
from pl_pipe.strategies.fusion.step_undo import StepUndo, all_metrics
from pl_pipe.strategies.fusion.tuning import is_timing_convolutions
from pl_pipe.strategies.fusion.variant_names import mean_loss

log = get_logger(__name__)

_RECORDINGS = 3
"""The most that are made, where settings change between steps."""


class ReplayedSteps:
    warmup = 2
    """Steps that take longer: the recording and the capture."""

    def __init__(
        self,
        members: Members,
        array: VariantArray[L.LightningModule] | None,
        *,
        as_array: bool,
        compiles: bool,
        otherwise: StepFormulation,
        tunes: bool = False,
        recorded: "ReplayedSteps | None" = None,
        chooser: Chooser | None = None,
    ) -> None:
        """Kernels may be compiled, and tuned then. `recorded` has recorded the same steps, for kernels of another kind:
        they need not be again. `chooser` picks how layers of an array are computed, in the place of its own."""
        kind = "array" if as_array else "branches"
        self.name = f"compiled {kind}" if compiles else "captured array" if as_array else kind
        self._members = members
        self._array = array
        self._as_array = as_array
        self._compiles = compiles
        self._tunes = tunes
        self._otherwise = otherwise
        self._recorded = recorded
        self._chooser = chooser
        self._recordings = 0
        self.optimizers: ReplayedOptimizers | None = None
        """Whose steps may be part of the graph."""
        self._lost = 0
        """Graphs with the optimizers' steps that did not hold, because of a schedule of momentum, say."""
        self._whole: Capture | None = None
        self._capture: Capture | None = None
        self._timed: Capture | None = None
        self.mean_loss: Tensor | None = None
        """Of the last step, where it was replayed; the next replay overwrites it."""
        self._forget()

    def run(self, call: StepCall) -> list[Any]:
        self.mean_loss = self._timed = None
        if not call.trains:
            return self._otherwise.run(call)
        step = self._step or self._taken_over()
        if step is None:
            return self._record(call)
        if not step.is_like(call):
            if call.clear_gradients is not None:
                call.clear_gradients()  # those of the last replay, which may be left as they are
            return self._otherwise.run(call)
        changed = step.changed()
        if changed is not None:
            self._forget()
            if call.clear_gradients is not None:
                call.clear_gradients()
            if self._recordings == _RECORDINGS:
                raise FusionError(f"{changed!r} changes from step to step, which a replay would not see")
            return self._record(call)
        with _default_dtype(step.dtype):
            self._replay(step, call)
        _put_gradients(step, call)
        return self._play(step, call)

    def _replay(self, step: RecordedStep, call: StepCall) -> None:
        self._inputs.load(call)
        if call.updates and self._is_whole(step):
            with marked_range("fusion: replay with optimizers", self._members.device):
                assert self._whole is not None
                self._whole.replay()
            return
        if self._capture is None:
            self._whole = None  # its values would be read where this one's are
            self._capture = self._captured(step)
        with marked_range("fusion: replay", self._members.device):
            self._capture.replay()
        self._timed = self._capture

    @property
    def device_s(self) -> float | None:
        """What the device took for the last step, if that was a replay and has ended."""
        return None if self._timed is None else self._timed.device_s()

    @property
    def leaves_gradients(self) -> bool:
        """Whether gradients of the last step need not be cleared: they are overwritten."""
        return self._whole is not None

    def keep(self, places: Sequence[int]) -> None:  # noqa: ARG002
        self._forget()

    def release(self) -> None:
        self._forget()

    @property
    def report(self) -> FusionReport | None:
        """How its array's layers are computed."""
        return None if self._step is None else self._step.report

    def described(self) -> str:
        told = "nothing recorded" if self._step is None else self._step.described()
        if self._shared is None:
            return told
        return f"{told}; {self._shared.operations} on the batch alone, once for all variants"

    def _forget(self) -> None:
        self._step: RecordedStep | None = None
        self._inputs = ReplayedInputs(self._members)
        self._shared: SharedPart | None = None
        self._capture = self._whole = self._timed = None
        self._has_chosen = False
        self._thread: ChoosingThread | None = None
        """Where captures are made, if not in the one that trains; after them, since they need it."""
        self._values = ReplayedValues()
        self._mean: Tensor | None = None
        self.mean_loss = None

    # ---- the first step

    def _record(self, call: StepCall) -> list[Any]:
        members, array = self._members, self._array
        refuse_other_tensors(call, members.device)
        recording_key(call)  # may refuse, too
        self._recordings += 1
        undo = StepUndo(members, array, args=call.args, metrics=all_metrics(members), weights=True)
        self._inputs.set_scales(call)
        scales = self._inputs.scales
        for one in () if array is None else array.stacked:
            one.follow()  # a parameter may have been frozen, or be another one
        try:
            if self._as_array:
                assert array is not None
                step = RecordedStep.of_array(members, call, scales, array=array, chooser=self._chooser)
            else:
                step = RecordedStep.of_variants(members, call, scales, undo=undo)
            outs = self._play(step, call)
        except Exception:
            self._forget()
            undo()
            if call.clear_gradients is not None:
                call.clear_gradients()
            raise
        _put_gradients(step, call)
        self._step = step
        return outs

    def _taken_over(self) -> RecordedStep | None:
        """What another has recorded, once; whether it still holds is asked at every step."""
        other, self._recorded = self._recorded, None
        if other is not None and other._step is not None:
            self._step = other._step.again()
        return self._step

    # ---- the second

    def _is_whole(self, step: RecordedStep) -> bool:
        """Whether the optimizers' steps are part of a graph, and that graph still holds."""
        optimizers = self.optimizers
        if optimizers is None:
            return False
        if self._whole is None and self._capture is not None and optimizers.can_join:
            self._capture = self._timed = None  # its memory is needed
            try:
                with optimizers.joining():
                    self._whole = self._made(
                        partial(
                            captured,
                            self._branches(step, optimizers),
                            partial(self._group_values, step),
                            self._members.device,
                            once=self._compute_shared,
                        )
                    )
            except Exception as error:
                log.warning("the optimizers' steps are not captured with the rest: %s", str(error).splitlines()[0])
                self.optimizers = None
        if self._whole is not None and not optimizers.before_joined():
            self._whole = None
            self._lost += 1
            if self._lost == CAPTURES:
                self.optimizers = None  # from now on they step by themselves, and this graph has the gradients alone
        return self._whole is not None

    def _branches(self, step: RecordedStep, optimizers: ReplayedOptimizers | None = None) -> list[Branch]:
        return [
            Branch(
                part.compute,
                part.turn,
                part.traced is not None and part.traced.is_random,
                () if optimizers is None else self._updates(part, place, optimizers),
            )
            for place, part in enumerate(step.parts)
        ]

    def _updates(
        self, part: VariantPart | ArrayPart, place: int, optimizers: ReplayedOptimizers
    ) -> list[Callable[[], None]]:
        def first(variant: int) -> None:
            for parameter, gradient in part.gradients():
                parameter.grad = gradient
            optimizers.step_of(variant)

        if not self._as_array:
            return [partial(first, place)]
        others = range(1, len(self._members.modules))
        return [partial(first, 0), *(partial(optimizers.step_of, variant) for variant in others)]

    def _captured(self, step: RecordedStep) -> Capture:
        device = self._members.device
        undo = StepUndo(self._members, self._array)
        if step.parts[0].run is None:
            for part in step.parts:
                part.prepare(self._inputs.batch, self._inputs.scales)
            variants = [part for part in step.parts if isinstance(part, VariantPart)]
            if variants:
                self._shared = SharedPart.of(variants, self._inputs.batch, compiles=self._compiles)
            if self._compiles:
                self._compile(step)
        branches = self._branches(step)

        def made() -> Capture:
            if device.type == "cuda":
                try:
                    warm_up(branches, device, once=self._compute_shared)
                finally:
                    undo()
            finish = partial(self._group_values, step)
            return captured(branches, finish, device, once=self._compute_shared, is_timed=True)

        if not self._has_chosen and self._compiles and step.has_convolutions and is_timing_convolutions(device):
            self._thread, self._has_chosen = quickest_thread(made, device, undo=undo), True
        return self._made(made)

    def _made(self, made: Made) -> Capture:
        return made() if self._thread is None else self._thread.run(made)

    def _compute_shared(self) -> None:
        if self._shared is not None:
            self._shared.compute()

    def _compile(self, step: RecordedStep) -> None:
        """Variants whose operations are the same have one function."""
        known: list[Any] = []
        for part in step.parts:
            same = next((one for one in known if isinstance(part, VariantPart) and part.like(one)), None)
            if same is not None:
                part.run = same.run
                continue
            if len(known) == _RECORDINGS:
                raise FusionError(f"the variants' steps differ in more than {_RECORDINGS} ways, each to be compiled")
            part.compile(tunes=self._tunes)
            known.append(part)

    def _group_values(self, step: RecordedStep) -> None:
        values = step.values()
        self._values.group(values)
        places = [step.part_of(variant).script.loss_place for variant in range(step.width)]
        self._mean = mean_loss(
            [None if place is None else own[place] for own, place in zip(values, places, strict=True)]
        )

    # ---- every step

    def _play(self, step: RecordedStep, call: StepCall) -> list[Any]:
        """What the steps say and return."""
        members, are_own = self._members, bool(self._values)
        if are_own:
            self.mean_loss = self._mean
        found = self._values.copies() if are_own else step.values()
        with call.context():  # where the steps would have said it
            return [
                detached(step.part_of(place).script.play(found[place], module, place, members.log, are_own=are_own))
                for place, module in enumerate(members.modules)
            ]


def _put_gradients(step: RecordedStep, call: StepCall) -> None:
    found = step.gradients()
    if not call.adds:
        for parameter, gradient in found:
            parameter.grad = gradient
        return
    with torch.no_grad():  # those of the recording are overwritten by the next replay
        sums = [(parameter.grad, gradient) for parameter, gradient in found if parameter.grad is not None]
        for parameter, gradient in found:
            if parameter.grad is None:
                parameter.grad = gradient.clone()
        if sums:
            torch._foreach_add_([total for total, _ in sums], [gradient for _, gradient in sums])


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Lightning sets another one around a step in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def marked_range(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """Shown by profilers of the GPU."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()
