"""Picks the quickest formulation while training goes on. steps -> *trial* -> a formulation.

The first steps are computed in one way after another, and timed; they are real steps, since all ways give the same
numbers. A way that fails has left no trace, and the next one takes the step over.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.step_formulation import StepCall, StepFormulation
from pl_pipe.strategies.fusion.variant_building import described
from pl_pipe.units import format_seconds

log = get_logger(__name__)

_WARMUP = 1
_TIMED = 3


class FormulationTrial:
    """For the steps of one kind (training, validation, …)."""

    def __init__(
        self,
        formulations: Sequence[StepFormulation],
        *,
        what: str,
        width: int,
        device: torch.device,
        instead: Mapping[str, StepFormulation] | None = None,
        more: Callable[[Mapping[str, float]], Sequence[StepFormulation]] | None = None,
    ) -> None:
        """`instead` has, for a formulation's name, the one that is tried where it fails; `more` may name further ones
        when the time of a step is known."""
        self._left = list(formulations)
        self._instead = dict(instead or {})
        self._more = more
        self._what = what
        self._width = width
        self._device = device
        self._times: dict[str, list[float]] = {one.name: [] for one in formulations}
        self._warm: dict[str, int] = {}
        self._signature: tuple[Any, ...] | None = None
        self._dropped: list[str] = []
        """What to say of ways that failed, once another has not."""
        self.chosen: StepFormulation | None = self._left[0] if len(self._left) == 1 and more is None else None

    @property
    def step_s(self) -> dict[str, float]:
        """The median time of a step, for each formulation that was timed."""
        return {name: statistics.median(found) for name, found in self._times.items() if found}

    @property
    def is_decided(self) -> bool:
        return self.chosen is not None

    def release(self) -> None:
        for formulation in self._left:
            formulation.release()

    def run(self, call: StepCall) -> list[Any]:
        while True:
            formulation = self.chosen or self._next()
            began = time.perf_counter()
            try:
                outs = formulation.run(call)
            except Exception as error:
                self._drop(formulation, error)
                continue
            self._tell_dropped()
            if self.chosen is None:
                self._note(formulation, call, began)
            return outs

    def _next(self) -> StepFormulation:
        for formulation in self._left:
            if len(self._times[formulation.name]) < _TIMED:
                return formulation
        return self._left[-1]

    def _note(self, formulation: StepFormulation, call: StepCall, began: float) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        signature = call.signature
        self._signature = self._signature or signature
        if signature == self._signature:
            self._warm[formulation.name] = self._warm.get(formulation.name, 0) + 1
            if self._warm[formulation.name] > getattr(formulation, "warmup", _WARMUP):
                self._times[formulation.name].append(time.perf_counter() - began)
        if all(len(self._times[one.name]) >= _TIMED for one in self._left):
            self._decide()

    def _decide(self) -> None:
        medians = {one.name: self.step_s[one.name] for one in self._left}
        if self._more is not None:
            added, self._more = list(self._more(medians)), None
            if added:
                self._left.extend(added)
                self._times.update({one.name: [] for one in added})
                return
        self.chosen = min(self._left, key=lambda one: medians[one.name])
        for one in self._left:
            if one is not self.chosen:
                one.release()  # it may be begun again, should the chosen one fail
        told = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in medians.items())
        log.info("%s: %s is used from here on (a step: %s)", self._what, self.chosen.name, told)

    def _drop(self, formulation: StepFormulation, error: Exception) -> None:
        """The next way takes over; without one, the error is the user's to see."""
        substitute = self._instead.pop(formulation.name, None)
        if len(self._left) == 1 and substitute is None:
            self._tell_dropped(unless=described(error))
            if isinstance(error, torch.OutOfMemoryError):
                raise self._too_wide(error) from error
            raise error
        place = self._left.index(formulation)
        self._left[place : place + 1] = [] if substitute is None else [substitute]
        if substitute is not None:
            self._times[substitute.name] = []
        self._dropped.append(
            f"{self._what}: not computed as {formulation.name}, but {self._left[0].name}: {described(error)}"
        )
        formulation.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # it may have failed for want of memory
        self.chosen = self._left[0] if len(self._left) == 1 and self._more is None else None

    def _tell_dropped(self, *, unless: str | None = None) -> None:
        """An error that every way meets is the step's own, and is raised: it need not be told for each."""
        for line in self._dropped:
            if unless is None or not line.endswith(unless):
                log.warning(line)
        self._dropped.clear()

    def _too_wide(self, error: Exception) -> FusionError:
        where = f"into the memory of {self._device} ({described(error)})"
        if self._width == 1:
            return FusionError(f"one variant's step does not fit {where}; make batches smaller")
        return FusionError(
            f"{self._what} do not fit {where}; train fewer at once: max_array={self._width // 2} makes arrays of half "
            "the size, one after another"
        )
