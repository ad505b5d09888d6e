"""Keeps `last.ckpt` fresh, so that a killed run loses little."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from pl_pipe.errors import ConfigError


class LastCheckpoint(Checkpoint):
    """Saves every `every_n_steps` optimizer steps and at the end of each epoch, always to the same file.

    Lightning's ModelCheckpoint does one or the other, not both; and its file name would carry a version.
    """

    def __init__(self, dirpath: str, every_n_steps: int = 100) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"callbacks.last.every_n_steps={every_n_steps} is too small; the least is 1")
        self.path = Path(dirpath) / "last.ckpt"
        self._every_n_steps = every_n_steps
        self._saved_step = -1

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % self._every_n_steps == 0:
            self._save(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Even when this step was saved already: the epoch's end is a different place to resume from.
        self._saved_step = -1
        self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        if getattr(trainer, "fast_dev_run", False) or trainer.global_step in (0, self._saved_step):
            return
        self._saved_step = trainer.global_step
        trainer.save_checkpoint(self.path, weights_only=False)
