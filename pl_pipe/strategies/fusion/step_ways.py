"""Which formulations of a step are tried, by device and settings. members, settings -> *ways* -> FormulationTrial."""

import math
from collections.abc import Mapping
from typing import Any

import lightning as L

from pl_pipe.fusion import Timed, Usual, VariantArray
from pl_pipe.strategies.fusion.array_steps import ArraySteps
from pl_pipe.strategies.fusion.lockstep_steps import LockstepSteps
from pl_pipe.strategies.fusion.replayed_steps import ReplayedSteps
from pl_pipe.strategies.fusion.settings import (
    ARRAY,
    AUTO,
    BRANCHES,
    CAPTURED_ARRAY,
    COMPILED_ARRAY,
    COMPILED_BRANCHES,
    LOCKSTEP,
    REPLAYED,
    TUNED,
    FusionSettings,
)
from pl_pipe.strategies.fusion.step_formulation import TRAINING, Members, OneByOne, StepFormulation

_WORTH_COMPILING_S = 180.0
"""Compiling takes 15 to 60 seconds, and makes steps a fifth to a half quicker."""
_SLOWER_ARRAY = 0.5
"""An array that, as captured, takes more than twice as long as another way will not win by compiling either."""


class StepWays:
    def __init__(
        self, members: Members, array: VariantArray[L.LightningModule] | None, settings: FusionSettings
    ) -> None:
        self._members = members
        self._array = array
        self._settings = settings
        self._recorders: dict[str, ReplayedSteps] = {}
        """Replays that are tried first, by name."""

    def first(self, hook: str) -> list[StepFormulation]:
        """Those that are tried, and timed where there are several."""
        plain: StepFormulation = OneByOne(self._members)
        asked = self._settings.formulation
        alone = self._array is None or len(self._members.modules) == 1
        if hook == TRAINING and asked in REPLAYED:
            return [self._replayed(BRANCHES if alone and asked == CAPTURED_ARRAY else asked)]
        if self.is_replayed(hook):
            names = [BRANCHES] if alone else [BRANCHES, CAPTURED_ARRAY]
            self._recorders = {name: self._replayed(name) for name in names}
            return list(self._recorders.values())
        if self._array is None or alone:
            return [plain]
        if asked == LOCKSTEP:
            return [LockstepSteps(self._members, self._array)]
        array = ArraySteps(self._members, self._array)
        return [array] if asked == ARRAY else [array, plain]

    def is_replayed(self, hook: str) -> bool:
        """Launching operations from Python leaves a GPU idle: there, training steps are captured and replayed."""
        return (
            hook == TRAINING
            and self._settings.formulation == AUTO
            and self._members.device.type == "cuda"
            and not self._settings.fuse_except
        )

    def _replayed(self, name: str, recorded: ReplayedSteps | None = None) -> ReplayedSteps:
        as_array = name in (CAPTURED_ARRAY, COMPILED_ARRAY) and len(self._members.modules) > 1
        compiles = name in (COMPILED_BRANCHES, COMPILED_ARRAY)
        chooser = None
        if as_array and compiles and self._settings.layers == AUTO:
            chooser = Usual()  # a layer by itself is timed without what the compiler makes one kernel of
            if not self._has_usual_layers:
                recorded = None
        return ReplayedSteps(
            self._members,
            self._array,
            as_array=as_array,
            compiles=compiles,
            tunes=self._settings.compile == TUNED,
            otherwise=OneByOne(self._members),
            recorded=recorded,
            chooser=chooser,
        )

    @property
    def _has_usual_layers(self) -> bool:
        """Whether nothing was recorded otherwise."""
        assert self._array is not None
        chooser = self._array.chooser
        return chooser.is_usual if isinstance(chooser, Timed) else True

    def instead(self, hook: str) -> dict[str, StepFormulation]:
        """What is tried where another way turns out to be impossible."""
        plain: dict[str, StepFormulation] = {BRANCHES: OneByOne(self._members)} if self.is_replayed(hook) else {}
        if self._array is None or self._settings.formulation != AUTO:
            return plain
        array, lockstep = ArraySteps(self._members, self._array), LockstepSteps(self._members, self._array)
        return {**plain, CAPTURED_ARRAY: array, ARRAY: lockstep} if plain else {ARRAY: lockstep}

    def compiled(self, step_s: Mapping[str, float]) -> list[StepFormulation]:
        """Where what is left of the training takes long enough for quicker steps to repay the compiler."""
        wanted = self._settings.compile
        left_s = steps_left(self._members.modules[0].trainer) * min(step_s.values())
        if wanted is False or (wanted == AUTO and left_s < _WORTH_COMPILING_S):
            return []
        found: list[StepFormulation] = []
        if BRANCHES in step_s:
            found.append(self._replayed(COMPILED_BRANCHES, self._recorders.get(BRANCHES)))
        if CAPTURED_ARRAY in step_s and step_s[CAPTURED_ARRAY] * _SLOWER_ARRAY < min(step_s.values()):
            found.append(self._replayed(COMPILED_ARRAY, self._recorders.get(CAPTURED_ARRAY)))
        return found


def steps_left(trainer: Any) -> float:
    """Batches still to be trained on, as far as the trainer knows."""
    epochs, batches = trainer.max_epochs, trainer.num_training_batches
    bounds = [math.inf if epochs in (None, -1) else (epochs - trainer.current_epoch) * batches]
    if trainer.max_steps not in (None, -1):
        bounds.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    return float(min(bounds))
