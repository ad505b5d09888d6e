"""What is recorded of a step, and computed again: one variant, or the array of all. call -> *part* -> gradients.

Both take tensors only: the variants' state, the batch, the factors of the losses. A part of one variant is computed on
a stream of its own; the array is one part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Protocol, Self

import lightning as L
import torch
from torch import Tensor, fx, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion import Chooser, VariantArray
from pl_pipe.fusion.replay import Traced, compiled, follow, trace
from pl_pipe.fusion.stacking import StackedParameter
from pl_pipe.strategies.fusion.replay_guard import guarded, refuse_hooks, refuse_reentrant, unread_numbers
from pl_pipe.strategies.fusion.settings_guard import SettingsGuard
from pl_pipe.strategies.fusion.shared_part import SharedPart
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall, loss_of
from pl_pipe.strategies.fusion.step_script import StepScript, metrics_noted
from pl_pipe.strategies.fusion.step_undo import Reads
from pl_pipe.tensors.arrays import is_array
from pl_pipe.tensors.taken_memory import TakenMemory

Gradients = list[tuple[nn.Parameter, Tensor]]


class Part(Protocol):
    traced: Traced | None

    def record(self, call: StepCall, inputs: Sequence[Tensor], scales: Tensor) -> None:
        """Runs the call's step while it is written down; its results are those of any run."""

    def prepare(self, inputs: Sequence[Tensor], scales: Tensor) -> None:
        """From now on it is computed of these tensors, whatever is in them."""

    def compute(self) -> None: ...

    def gradients(self) -> Gradients:
        """Of the last run: each variant's parameters and their gradients, laid out alike."""

    def values(self, variant: int) -> list[Tensor]:
        """What the script of one of its variants needs."""

    def turn(self) -> AbstractContextManager[None]:
        """Random numbers are its variant's."""


class _Recorded(ABC):
    """What the two kinds have in common."""

    def __init__(self) -> None:
        self.traced: Traced | None = None
        self.reads: Reads = set()
        """What the step's Python has read while it was recorded."""
        self.script = StepScript([], None)
        self.run: Callable[..., Sequence[Tensor]] | None = None
        self._leaves: list[Tensor] = []
        """Tensors with gradients, of which there may be none."""
        self._state: list[Tensor] = []
        self._given: list[Tensor] = []
        self._has_gradient: list[bool] = []
        self._results: list[Tensor] = []
        self._pairs: tuple[list[Tensor], Gradients] = ([], [])

    def again(self) -> Self:
        """The same recording, to be computed by other kernels into other memory."""
        found = copy(self)
        found.run, found._results, found._pairs = None, [], ([], [])
        return found

    def gradients(self) -> Gradients:
        """The same objects as long as the same memory is computed into."""
        if self._pairs[0] is not self._results:
            self._pairs = self._results, self._paired()
        return self._pairs[1]

    @abstractmethod
    def _paired(self) -> Gradients: ...

    def _trace(
        self,
        step: Callable[[], tuple[Sequence[Tensor | None], StepScript]],
        inputs: Sequence[Tensor],
        expected: Traced | None = None,
    ) -> None:
        def flat() -> list[Tensor]:
            gradients, self.script = step()
            self._has_gradient = [gradient is not None for gradient in gradients]
            found = [
                _laid_out(gradient, leaf.detach())  # here it is among the operations that are compiled
                for leaf, gradient in zip(self._leaves, gradients, strict=True)
                if gradient is not None
            ]
            return [*found, *self.script.tensors]

        if expected is None:
            self.traced = trace(flat, state=self._state, inputs=inputs)
        else:
            self.traced = follow(flat, expected, state=self._state, inputs=inputs)
        self._results = self._arranged(self.traced.values, [*self._state, *inputs])
        self.traced.values.clear()
        self.script.tensors.clear()

    def compute(self) -> None:
        assert self.run is not None
        with torch.no_grad():
            arguments = self._arguments()
            self._results = self._arranged(self.run(*arguments), arguments)

    def _arranged(self, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Gradients lie as their parameters do, and each in memory of its own, as a backward would leave them."""
        found = [tensor.detach() for tensor in outputs]
        taken = TakenMemory(given)
        for place, leaf in enumerate(self._with_gradients):
            found[place] = _laid_out(found[place], leaf.detach())
            if not taken.take(found[place]):
                found[place] = found[place].clone()  # clipping would count twice, or for other variants
        return found

    def compile(self, *, tunes: bool) -> None:
        assert isinstance(self.run, fx.GraphModule)
        assert self.traced is not None
        if self.traced.unsaid:
            raise FusionError(
                f"the step draws random numbers by {self.traced.unsaid[0]}, which does not say so (by the tag "
                "nondeterministic_seeded): compiled, it may draw others"
            )
        self.run = compiled(self.run, self._arguments(), tunes=tunes)

    def _arguments(self) -> list[Tensor]:
        return [*self._state, *self._given]

    @property
    def _with_gradients(self) -> list[Tensor]:
        return [leaf for leaf, has in zip(self._leaves, self._has_gradient, strict=True) if has]

    @property
    def _values(self) -> list[Tensor]:
        return self._results[len(self._with_gradients) :]


class VariantPart(_Recorded):
    """One variant's step."""

    def __init__(self, members: Members, place: int) -> None:
        super().__init__()
        self._members = members
        self._place = place
        self._module = members.modules[place]
        self._leaves = [one for one in self._module.parameters() if one.requires_grad]
        self._state = [*self._module.parameters(), *self._module.buffers()]
        self._shared: SharedPart | None = None

    def record(self, call: StepCall, inputs: Sequence[Tensor], scales: Tensor, expected: Traced | None = None) -> None:
        """What is `expected` is another variant's; where this one's differs, that is an OperationsDifferError."""
        module, scale = self._module, scales[self._place]
        args = unread_numbers(call.args)

        def step() -> tuple[Sequence[Tensor | None], StepScript]:
            with (
                self._members.log.noting(for_all=False) as notes,
                guarded(module, self.reads),
                metrics_noted(module, notes),
            ):
                with call.context():
                    out = getattr(module, call.hook)(*args, **call.kwargs)
                loss = loss_of(out)
                if loss is None:
                    raise FusionError("training_step returns no loss, and may do so for other batches than others")
                refuse_reentrant(loss)
                gradients = torch.autograd.grad(loss * scale, self._leaves, allow_unused=True)
            return gradients, StepScript.of(notes, out, module)

        refuse_hooks(module)
        with self.turn():
            self._trace(step, (*inputs, scale), expected)
        assert self.traced is not None
        if self.traced.is_random and self.traced.is_seeding:
            raise FusionError(
                "the step draws random numbers and sets their state in between (`torch.manual_seed`, `fork_rng`, "
                "checkpointing of dropout), which a replay would not"
            )

    def prepare(self, inputs: Sequence[Tensor], scales: Tensor) -> None:
        assert self.traced is not None
        self.run, self._shared = self.traced.graph, None
        self._given = [*inputs, scales[self._place]]

    @property
    def batch_places(self) -> range:
        return range(len(self._state), len(self._state) + len(self._given) - 1)

    def share(self, shared: SharedPart, rest: fx.GraphModule) -> None:
        self.run, self._shared = rest, shared

    def _arguments(self) -> list[Tensor]:
        found = [] if self._shared is None else self._shared.results
        return [*self._state, *self._given[:-1], *found, self._given[-1]]

    def _paired(self) -> Gradients:
        return list(zip(self._with_gradients, self._results, strict=False))  # type: ignore[arg-type]

    def values(self, variant: int) -> list[Tensor]:  # noqa: ARG002
        return self._values

    def turn(self) -> AbstractContextManager[None]:
        if self._members.is_one_as_usual:
            return nullcontext()
        return self._members.streams.turn(self._place)

    def again(self) -> Self:
        found = super().again()
        found._shared = None
        return found

    def like(self, other: "VariantPart") -> bool:
        assert self.traced is not None
        assert other.traced is not None
        return self.traced.is_like(other.traced)


def record_variants(
    members: Members, call: StepCall, inputs: Sequence[Tensor], scales: Tensor, *, are_alike: bool
) -> list[VariantPart]:
    """Every variant's step runs. If all are alike, the first one's operations are written down for them all."""
    parts = [VariantPart(members, place) for place in range(len(members.modules))]
    expected: Traced | None = None
    for part in parts:
        part.record(call, inputs, scales, expected)
        if are_alike and expected is None and part.traced is not None and part.traced.is_anyones:
            expected = part.traced
    return parts


class ArrayPart(_Recorded):
    """The step of all variants, as one array."""

    def __init__(self, members: Members, array: VariantArray[L.LightningModule], chooser: Chooser | None) -> None:
        """`chooser` picks how layers are computed, in the place of the array's own."""
        super().__init__()
        self._members = members
        self._array = array
        self._chooser = chooser
        self.report = array.report
        """How each layer is computed."""
        self._stacked = [one for one in array.stacked if isinstance(one, StackedParameter) and one.tensor.requires_grad]
        self._leaves = [one.tensor for one in self._stacked]
        self._state = [one.tensor for one in array.stacked]
        self._guard = SettingsGuard(members.modules, members.turns)
        self._is_each_ones: list[bool] = []

    def record(self, call: StepCall, inputs: Sequence[Tensor], scales: Tensor) -> None:
        members, first = self._members, self._members.modules[0]
        args = unread_numbers(call.args)

        def step() -> tuple[Sequence[Tensor | None], StepScript]:
            with (
                members.log.noting(for_all=True) as notes,
                self._array.fused(is_recorded=True, chooser=self._chooser) as template,
                guarded(first, self.reads),
                self._guard.standing(),
                metrics_noted(first, notes),
                call.context(),
            ):
                out = getattr(template, call.hook)(*args, **call.kwargs)
            loss = out.get("loss") if isinstance(out, Mapping) else out
            if not is_array(loss) or loss.ndim != 1:
                raise FusionError("training_step returns no loss of one number for each variant")
            with guarded(first, self.reads), self._guard.standing():  # hooks may read what a step may not
                gradients = torch.autograd.grad(loss, self._leaves, scales.to(loss.dtype), allow_unused=True)
            script = StepScript.of(notes, out, first)
            self._is_each_ones = [is_array(tensor) for tensor in script.tensors]
            return gradients, script

        for module in members.modules:
            refuse_hooks(module)
        noted = nullcontext(self._array.report) if self._chooser is None else self._array.report.apart()
        with noted as self.report, _without_gradients(members.modules):
            self._trace(step, (*inputs, scales))
        assert self.traced is not None
        if self.traced.is_random:
            raise FusionError("the step draws random numbers, of which each variant has its own")

    def prepare(self, inputs: Sequence[Tensor], scales: Tensor) -> None:
        assert self.traced is not None
        self.run = self.traced.graph
        self._given = [*inputs, scales]

    def _paired(self) -> Gradients:
        leaves = [one for one, has in zip(self._stacked, self._has_gradient, strict=True) if has]
        return [
            (parameter, gradient)
            for one, stacked in zip(leaves, self._results, strict=False)
            for parameter, gradient in zip(one.own, stacked.unbind(), strict=True)
            if parameter.requires_grad
        ]

    def values(self, variant: int) -> list[Tensor]:
        return [value[variant] if own else value for value, own in zip(self._values, self._is_each_ones, strict=True)]

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def _without_gradients(modules: Sequence[L.LightningModule]) -> Iterator[None]:
    """Gradients of earlier batches, which an accumulation goes on with, are no part of the recording."""
    before = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """As the parameter lies in memory: fused optimizers go through both side by side."""
    if gradient.layout != torch.strided:
        raise FusionError(
            f"an embedding of shape {list(like.shape[-2:])} has sparse gradients, whose number a replay cannot change; "
            "set sparse=False in it"
        )
    if _steps(gradient) == _steps(like) and gradient.dtype == like.dtype:
        return gradient
    return torch.empty_like(like).copy_(gradient)


def _steps(tensor: Tensor) -> list[int]:
    """Strides that matter: those of dimensions with several places."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
