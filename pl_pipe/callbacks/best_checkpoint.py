"""Keeps the best checkpoint, and says what to set when the model never logs the value it is chosen by."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)

USUAL_MONITOR = "val_loss"


class BestCheckpoint(ModelCheckpoint):
    """`best.ckpt` by a monitored value of validation.

    Without a `monitor` it is the lowest `val_loss`, if the model logs one; otherwise there is no best checkpoint and a
    warning says so. A `monitor` that was asked for and is not logged is an error once validation has run.
    """

    def __init__(self, dirpath: str, monitor: str | None = None, mode: str = "min", **options: Any) -> None:
        super().__init__(
            dirpath=dirpath,
            filename="best",
            monitor=monitor or USUAL_MONITOR,
            mode=mode if monitor else "min",
            enable_version_counter=False,
            **options,
        )
        self._asked_for = monitor is not None
        self._validated = False
        self._warned = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        self._validated = True
        if self.monitor in trainer.callback_metrics:
            super().on_validation_end(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Only now is everything logged that an epoch logs, metrics of training included.
        if self.monitor in trainer.callback_metrics:
            super().on_train_epoch_end(trainer, pl_module)
        elif self._validated:
            self._explain(trainer)

    def _explain(self, trainer: L.Trainer) -> None:
        names = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        if self._asked_for:
            raise ConfigError(
                f"the best checkpoint is chosen by monitor={self.monitor}, which the model does not log; "
                f"it logs {names}; set monitor=<one of them>, and monitor_mode=min or max"
            )
        if not self._warned and trainer.is_global_zero:
            log.warning(
                "there will be no best.ckpt, because the model does not log %s; it logs %s; set monitor=<one of them>, "
                "and monitor_mode=min or max",
                USUAL_MONITOR,
                names,
            )
        self._warned = True
