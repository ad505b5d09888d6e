"""Ways to run the same step: recorded, timed by layer, or plain. steps -> *passes* -> layer_profiler."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.profiling.clocks import Clock
from pl_pipe.profiling.place import refuse_opaque
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.profiling.steps import Step, loss_of
from pl_pipe.profiling.timers import LayerTimer
from pl_pipe.tensors import Recorder, Recording
from pl_pipe.tensors.trees import map_tensors

Signature = tuple[tuple[str, str], ...]
"""Module and description of every layer, in the order they ran."""


@dataclass(frozen=True)
class Passes:
    """One step on one batch; all passes start from the same random numbers."""

    model: nn.Module
    batch: Any
    step: Step
    means_outputs: bool
    """The loss is the mean of what the step returns."""
    device: torch.device
    autocast_dtype: torch.dtype | None
    clock: Clock
    """The host's."""
    start_state: ModelState
    start_random: RandomState

    def record(self) -> tuple[Recording, Signature]:
        batch = self._fresh_batch()
        with self._ready():
            with self._autocast(), Recorder(self.model, batch) as recorder:
                outcome = self.step(self.model, batch)
            self._loss(outcome).backward()  # type: ignore[no-untyped-call]
        recording = recorder.recording()
        refuse_opaque(self.model, recording)
        return recording, recorder.signature

    def timed(self, timer: LayerTimer) -> Signature:
        """Times a pass, and tells which layers it ran."""
        batch = self._fresh_batch()
        with self._ready():
            recorder = Recorder(self.model, batch, watch=timer, measure_memory=False)
            with self._autocast(), recorder:
                outcome = self.step(self.model, batch)
            loss = self._loss(outcome)
            with timer.backward(self.model):
                loss.backward()  # type: ignore[no-untyped-call]
            self.clock.settle()
        return recorder.signature

    def plain(self) -> float:
        """Seconds of the step as it is."""
        batch = self._fresh_batch()
        with self._ready():
            start = self.clock.mark()
            with self._autocast():
                outcome = self.step(self.model, batch)
            self._loss(outcome).backward()  # type: ignore[no-untyped-call]
            self.clock.settle()
            end = self.clock.mark()
        return self.clock.seconds(start, end)

    def start_over(self) -> None:
        """Undoes what earlier passes changed in the model: a step may count its calls and act on the count."""
        self.start_state.restore()

    def _fresh_batch(self) -> Any:
        return map_tensors(self.batch, Tensor.clone)  # a step may change it

    def _loss(self, outcome: Any) -> Tensor:
        return loss_of(outcome, self.model, from_outputs=self.means_outputs)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """No gradients from before, the same random numbers, and no garbage collection in the middle."""
        self.start_state.restore_attributes()  # a step may count its calls, and act on the count
        for parameter in self.model.parameters():
            parameter.grad = None
        self.start_random.restore()
        self.clock.settle()
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()
