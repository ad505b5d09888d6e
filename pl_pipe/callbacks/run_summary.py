"""Counts what a fit did (samples, time, best and last metrics) and states it as one record."""

import math
import time
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from pl_pipe.callbacks.best_checkpoint import USUAL_MONITOR
from pl_pipe.callbacks.replicas import data_replicas
from pl_pipe.errors import ConfigError


@dataclass
class BestEpoch:
    """The validation with the best monitored value."""

    monitor: str
    value: float
    epoch: int
    step: int
    metrics: dict[str, float]


@dataclass
class FitRecord:
    """The outcome of one `fit`."""

    epochs: int = 0
    steps: int = 0
    """Optimizer steps in all; a resumed run goes on counting."""
    own_steps: int = 0
    """Optimizer steps of this run alone."""
    samples: int | None = 0
    """Training samples of this run on all ranks; null where a batch does not tell its size."""
    train_s: float = 0.0
    """Seconds spent in training epochs, validation excluded."""
    samples_per_s: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    best: BestEpoch | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RunSummary(L.Callback):
    """Keeps `record` up to date; it says nothing and writes nothing itself."""

    def __init__(self, monitor: str | None = None, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"monitor_mode={mode} is unknown; choose min or max")
        self.record = FitRecord()
        self._monitor = monitor or USUAL_MONITOR
        self._sign = 1.0 if mode == "min" or monitor is None else -1.0
        self._running_since: float | None = None
        self._first_step = 0

    @override
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record = FitRecord()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first_step = trainer.global_step
        self._running_since = time.perf_counter()  # a run resumed inside an epoch has no start of that epoch

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._running_since = self._running_since or time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        size = _batch_size(batch)
        if size is None or self.record.samples is None:
            self.record.samples = None
        else:
            self.record.samples += size * data_replicas(trainer)
        self.record.steps = trainer.global_step
        self.record.own_steps = trainer.global_step - self._first_step

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._running_since = time.perf_counter()
        self.record.last = _numbers(trainer.callback_metrics)
        self._note_best(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause()
        counted = getattr(trainer.strategy, "trained_samples", None)
        if counted is not None and self.record.samples is not None:
            self.record.samples = counted  # ranks that do different numbers of batches count together
        self.record.epochs = trainer.current_epoch + 1

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.record.last = _numbers(trainer.callback_metrics)
        self._close()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        # Metrics are not read here: computing them is a collective, and this rank may be the only one to fail.
        self._close()

    def _pause(self) -> None:
        if self._running_since is not None:
            self.record.train_s += time.perf_counter() - self._running_since
            self._running_since = None

    def _note_best(self, trainer: L.Trainer) -> None:
        metrics = self.record.last
        value = metrics.get(self._monitor, math.nan)
        best = self.record.best
        if math.isnan(value) or (best is not None and self._sign * value >= self._sign * best.value):
            return
        self.record.best = BestEpoch(self._monitor, value, trainer.current_epoch, trainer.global_step, metrics)

    def _close(self) -> None:
        self._pause()
        if self.record.samples and self.record.train_s:
            self.record.samples_per_s = self.record.samples / self.record.train_s


def _batch_size(batch: Any) -> int | None:
    with warnings.catch_warnings():  # Lightning warns where a batch holds tensors of several sizes
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:
            return None


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
