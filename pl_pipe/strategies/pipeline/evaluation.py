"""Validation, tests and predictions of a pipeline, as Lightning's loop calls for them. PipeDreamStrategy -> *this*.

Every batch is a step of its own, with nothing in flight from training; stages run a few batches ahead of the next.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import lightning as L

from pl_pipe.runtime.step_numbers import StepNumbers
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.step_log import StepLog
from pl_pipe.strategies.pipeline.trainer_parts import drawing_alike
from pl_pipe.tensors.trees import map_tensors

_AHEAD = 4  # batches that a stage may be ahead of the next one


class PipelineEvaluation:
    """One rank's part of it, between `setup` and `teardown`."""

    def __init__(self, module: L.LightningModule, divided: DividedModel, *, numbers: StepNumbers, log: StepLog) -> None:
        self._module, self._divided, self._numbers, self._log = module, divided, numbers, log

    def step(
        self, hook: str, context: AbstractContextManager[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """What the user's step returned; it is whole on the rank that reports."""
        number = self._numbers.evaluated()
        out_of_turn = not self._divided.has_turn(number)
        stepper, content = self._divided.stepper, (args[0], args[2:])
        output = None  # ranks of earlier stages leave a step that reads a later one's value
        with stepper.step(number, content, out_of_turn=out_of_turn) as step, self._log.hearing(step), context:
            with drawing_alike(step):
                output = getattr(self._module, hook)(*args, **kwargs)
            output = map_tensors(output, step.bring)
        self._log.end()
        self._divided.wait_for_sends(before=number - _AHEAD)
        return output
