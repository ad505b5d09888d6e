"""Keeps `last.ckpt` fresh, so that a killed run loses little."""

import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from pl_pipe.errors import ConfigError

_PACE_STEPS = 5  # steps to watch before the first interval is set


class LastCheckpoint(Checkpoint):
    """Saves to one file at the end of each epoch, and about every `every_s` seconds within it.

    All ranks must save at the same step, but a clock they agree on would cost a collective a batch. So rank 0 turns
    seconds into a number of steps, from the pace since the last save, and tells the others at each save only.
    `every_n_steps` fixes that number instead. (Lightning's ModelCheckpoint asks rank 0's clock every batch, and
    cannot save at epoch ends as well.)
    """

    def __init__(self, dirpath: str, every_s: float = 60.0, every_n_steps: int | None = None) -> None:
        if every_s <= 0:
            raise ConfigError(f"callbacks.last.every_s={every_s} is not positive; 60 is the default")
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"callbacks.last.every_n_steps={every_n_steps} is too small; the least is 1")
        self.path = Path(dirpath) / "last.ckpt"
        self._every_s = every_s
        self._every_n_steps = every_n_steps
        self._since = 0.0
        self._since_step = 0
        self._next_step = 0
        self._pace_known = False

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pace_known = self._every_n_steps is not None
        self._begin_interval(trainer, self._every_n_steps or _PACE_STEPS)

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < self._next_step or not getattr(trainer.strategy, "saves_within_epochs", True):
            return
        if self._pace_known:
            self._save(trainer)
        self._begin_interval(trainer, self._every_n_steps or self._agreed_interval(trainer))
        self._pace_known = True

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Computing the epoch's metrics is a collective, which rank 0's progress bar has just begun; saving is another.
        # Every rank must do them in the same order, so the metrics come first here too (they are cached afterwards).
        _ = trainer.callback_metrics
        # Saved even when this step was saved already: the epoch's end is a different place to resume from.
        self._save(trainer)

    def _agreed_interval(self, trainer: L.Trainer) -> int:
        pace_s = (time.monotonic() - self._since) / max(1, trainer.global_step - self._since_step)
        return trainer.strategy.broadcast(max(1, round(self._every_s / max(pace_s, 1e-6))))

    def _begin_interval(self, trainer: L.Trainer, steps: int) -> None:
        self._since, self._since_step = time.monotonic(), trainer.global_step
        self._next_step = trainer.global_step + steps

    def _save(self, trainer: L.Trainer) -> None:
        if not getattr(trainer, "fast_dev_run", False):
            trainer.save_checkpoint(self.path, weights_only=False)
