"""How long steps take. trainer's hooks -> *StepTime* -> loggers, policies."""

import time
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import override

from pl_pipe.adapt.monitors.base import Monitor, samples_of


class StepTime(Monitor):
    """Logs `step_s`, from the end of one step to the end of the next, and `samples_per_s` of all ranks together."""

    def __init__(self, *, interval: int = 1, folder: str | Path | None = None) -> None:
        """
        Args:
            folder: for a `rank0.csv` of each rank: step, number of workers, the rank's samples a second, and when the
                step ended. What workers that have gone have written is kept.
        """
        super().__init__(interval=interval)
        self._folder = None if folder is None else Path(folder)
        self._ended_s: float | None = None
        self._samples = 0
        self.step_s = self.samples_per_s = float("nan")

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended_s, self._samples = time.perf_counter(), 0  # validation is no part of a step

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._ended_s, self._samples = None, 0

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += samples_of(batch, self)
        if not self.is_step(trainer):
            return
        now_s, is_due = time.perf_counter(), self.was_due(trainer)
        if self._ended_s is not None:
            self.step_s = now_s - self._ended_s
            self.samples_per_s = self._samples * _replicas(trainer) / self.step_s
            if is_due:
                self.report(
                    trainer,
                    {"step_s": self.step_s, "samples_per_s": self.samples_per_s},
                    step=trainer.global_step - 1,
                )
                self._note(trainer)
        self._ended_s, self._samples = now_s, 0

    def _note(self, trainer: L.Trainer) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rate = round(self._samples / self.step_s, 3)
        row = trainer.global_step - 1, trainer.world_size, rate, round(time.time(), 3)
        with (self._folder / f"rank{trainer.global_rank}.csv").open("a") as file:
            if not file.tell():
                file.write("step,workers,samples_per_s,ended_at_s\n")
            file.write(",".join(map(str, row)) + "\n")


def _replicas(trainer: L.Trainer) -> int:
    """Ranks that have batches of their own: a pipeline's share theirs."""
    kwargs: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    return int(kwargs.get("num_replicas", 1))
