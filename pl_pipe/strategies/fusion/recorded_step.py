"""A step of all variants that was written down, and whether that still holds. call -> *recorded step* -> replays."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import lightning as L
import torch
from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.fusion import Chooser, FusionReport, VariantArray
from pl_pipe.fusion.replay import OperationsDifferError
from pl_pipe.fusion.stacking import StackedBuffer
from pl_pipe.strategies.fusion.recorded_parts import ArrayPart, Gradients, VariantPart, record_variants
from pl_pipe.strategies.fusion.replay_guard import Watched
from pl_pipe.strategies.fusion.replayed_inputs import recording_key
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall
from pl_pipe.tensors.trees import tensors_in


@dataclass(frozen=True)
class RecordedStep:
    parts: Sequence[VariantPart | ArrayPart]
    """One for each variant, or one for all."""
    width: int
    dtype: torch.dtype
    """What operations give that were recorded without a type of their own."""
    _key: tuple[Any, ...]
    _watched: Watched
    _constants: Sequence[tuple[str, Tensor, int]]
    """Buffers that are the same for all, of which an array has recorded the numbers."""

    @classmethod
    def of_variants(cls, members: Members, call: StepCall, scales: Tensor, *, undo: Callable[[], None]) -> Self:
        """Every variant's own step runs; `undo` takes back what a run has done."""

        def recorded(inputs: Sequence[Tensor]) -> list[VariantPart]:
            with suppress(OperationsDifferError):  # of a dropout, say, of which each has its own
                return record_variants(members, call, inputs, scales, are_alike=True)
            undo()
            return record_variants(members, call, inputs, scales, are_alike=False)

        return cls._of(members, call, recorded)

    @classmethod
    def of_array(
        cls,
        members: Members,
        call: StepCall,
        scales: Tensor,
        *,
        array: VariantArray[L.LightningModule],
        chooser: Chooser | None,
    ) -> Self:
        """`chooser` picks how layers are computed, in the place of the array's own."""

        def recorded(inputs: Sequence[Tensor]) -> list[ArrayPart]:
            part = ArrayPart(members, array, chooser)
            part.record(call, inputs, scales)
            return [part]

        found = cls._of(members, call, recorded)
        constants = [one for one in array.stacked if isinstance(one, StackedBuffer) and one.is_constant]
        return replace(
            found, _constants=[(one.name, buffer, buffer._version) for one in constants for buffer in one.own]
        )

    @classmethod
    def _of(
        cls,
        members: Members,
        call: StepCall,
        recorded: Callable[[Sequence[Tensor]], Sequence[VariantPart | ArrayPart]],
    ) -> Self:
        key = recording_key(call)
        with call.context():
            dtype = torch.get_default_dtype()
        watched = Watched(members.modules)
        parts = recorded(tensors_in(call.args))
        changed = watched.changed()
        if changed is not None or watched.added():
            raise FusionError(f"the step changes {changed or 'attributes'!r} of the module, which a replay would not")
        found = cls(parts, len(members.modules), dtype, key, watched, ())
        watched.watch_reads([found.part_of(variant).reads for variant in range(found.width)])
        return found

    def again(self) -> Self:
        """The same, to be computed by other kernels into other memory."""
        return replace(self, parts=[part.again() for part in self.parts])

    def is_like(self, call: StepCall) -> bool:
        """Whether the call differs in numbers alone."""
        return recording_key(call) == self._key

    def changed(self) -> str | None:
        """What the step has read and is otherwise now."""
        constants = (name for name, buffer, version in self._constants if buffer._version != version)
        return self._watched.changed() or next(constants, None)

    def part_of(self, variant: int) -> VariantPart | ArrayPart:
        return self.parts[variant if len(self.parts) > 1 else 0]

    def values(self) -> list[list[Tensor]]:
        """Of each variant: what it says."""
        return [self.part_of(variant).values(variant) for variant in range(self.width)]

    def gradients(self) -> Gradients:
        return [pair for part in self.parts for pair in part.gradients()]

    @property
    def report(self) -> FusionReport | None:
        """Of an array."""
        return next((part.report for part in self.parts if isinstance(part, ArrayPart)), None)

    @property
    def has_convolutions(self) -> bool:
        return any(part.traced is not None and part.traced.has_convolutions for part in self.parts)

    def described(self) -> str:
        graphs = {id(part.traced.graph): part.traced.graph for part in self.parts if part.traced is not None}
        most = max((len(graph.graph.nodes) for graph in graphs.values()), default=0)
        return f"{len(self.parts)} parts, {len(graphs)} recordings of up to {most} operations"
