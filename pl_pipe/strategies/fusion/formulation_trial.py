"""Picks the quickest formulation while training goes on. steps -> *trial* -> a formulation.

The first steps are computed in one way after another, and timed; they are real steps, since all ways give the same
numbers. A way that fails has left no trace, and the next one takes the step over.

A replay's Python runs while the device is still busy with the step before, once steps are not waited for one by one. So
where the device's time is known, a step counts as that, or as its Python if that takes longer, not as both together.

Ranks that train together go on in the same way: until one is chosen, they tell each other after every step how long it
took and which ways have failed, and so all know the same. A way that fails later is left by the rank where it did.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.settings import ARRAY, LOCKSTEP, ONE_BY_ONE, REPLAYED
from pl_pipe.strategies.fusion.step_formulation import StepCall, StepFormulation
from pl_pipe.strategies.fusion.variant_building import described
from pl_pipe.units import format_seconds

log = get_logger(__name__)

_WARMUP = 1
_TIMED = 3
_NAMES = (*REPLAYED, ARRAY, LOCKSTEP, ONE_BY_ONE)
"""One that is tried in another's place comes after it."""
_NOT_COUNTED = -1.0


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
        is_timed: bool = True,
        largest: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> None:
        """`instead` has, for a formulation's name, the one that is tried where it fails; `more` may name further ones
        when the time of a step is known. Unless steps are timed, the first way that is possible is taken. `largest`
        gives the largest of every number among ranks that all take this step."""
        self._left = list(formulations)
        self._instead = dict(instead or {})
        self._more = more
        self._what = what
        self._width = width
        self._device = device
        self._is_timed = is_timed
        self._largest = largest
        self._times: dict[str, list[float]] = {one.name: [] for one in formulations}
        self._warm: dict[str, int] = {}
        self._signature: tuple[Any, ...] | None = None
        self._dropped: list[str] = []
        """What to say of ways that failed, once another has not."""
        self.chosen: StepFormulation | None = self._settled()

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
        is_open = self.chosen is None  # which at this point all ranks have alike
        failed: list[str] = []
        while True:
            formulation = self.chosen or self._next()
            began = time.perf_counter()
            try:
                outs = formulation.run(call)
            except Exception as error:
                self._drop(formulation, described(error), error)
                failed.append(formulation.name)
                continue
            self._tell_dropped()
            if is_open:
                self._note(formulation, self._taken(formulation, call, began), failed)
            return outs

    def _settled(self) -> StepFormulation | None:
        """The one that is used from here on, if there is nothing to time."""
        is_only = len(self._left) == 1 and self._more is None
        return self._left[0] if is_only or not self._is_timed else None

    def _next(self) -> StepFormulation:
        for formulation in self._left:
            if len(self._times[formulation.name]) < _TIMED:
                return formulation
        return self._left[-1]

    def _taken(self, formulation: StepFormulation, call: StepCall, began: float) -> float:
        """The step's time, where its batch is like the first one's."""
        python_s = time.perf_counter() - began
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        waited_s = time.perf_counter() - began
        self._signature = self._signature or call.signature
        if call.signature != self._signature:
            return _NOT_COUNTED
        device_s: float | None = getattr(formulation, "device_s", None)
        return waited_s if device_s is None else max(python_s, device_s)

    def _note(self, formulation: StepFormulation, step_s: float, failed: Sequence[str]) -> None:
        if self._largest is not None:
            step_s, *lost = self._largest([step_s, *(float(name in failed) for name in _NAMES)])
            self._drop_what_failed_elsewhere([name for name, was in zip(_NAMES, lost, strict=True) if was], failed)
            if any(lost):  # ranks have computed this step in different ways
                step_s = _NOT_COUNTED
        if self.chosen is not None:
            return
        if step_s != _NOT_COUNTED:
            self._warm[formulation.name] = self._warm.get(formulation.name, 0) + 1
            if self._warm[formulation.name] > getattr(formulation, "warmup", _WARMUP):
                self._times[formulation.name].append(step_s)
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
        self._is_timed = self._largest is None  # nobody else will know when it fails
        for one in self._left:
            if one is not self.chosen:
                one.release()  # it may be begun again, should the chosen one fail
        told = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in medians.items())
        log.info("%s: %s is used from here on (a step: %s)", self._what, self.chosen.name, told)

    def _drop_what_failed_elsewhere(self, names: Sequence[str], here: Sequence[str]) -> None:
        for name in names:
            formulation = next((one for one in self._left if one.name == name), None)
            if formulation is not None and name not in here:
                self._drop(formulation, "another rank cannot")
        self._tell_dropped()

    def _drop(self, formulation: StepFormulation, why: str, error: Exception | None = None) -> None:
        """The next way takes over; without one, the error is the user's to see."""
        substitute = self._instead.pop(formulation.name, None)
        if error is not None and len(self._left) == 1 and substitute is None:
            self._tell_dropped(unless=why)
            if isinstance(error, torch.OutOfMemoryError):
                raise self._too_wide(error) from error
            if isinstance(error, FusionError) and formulation.name != ONE_BY_ONE:
                raise FusionError(f"{error}; formulation=auto finds a way that can") from error
            raise error
        place = self._left.index(formulation)
        self._left[place : place + 1] = [] if substitute is None else [substitute]
        if substitute is not None:
            self._times[substitute.name] = []
        self._dropped.append(f"{self._what}: not computed as {formulation.name}, but {self._left[0].name}: {why}")
        formulation.release()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # it may have failed for want of memory
        self.chosen = self._settled()

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
