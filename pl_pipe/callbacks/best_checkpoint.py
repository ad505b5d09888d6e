"""Keeps the best checkpoint, and says what to set when the model never logs the value it is chosen by."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)


class BestCheckpoint(ModelCheckpoint):
    """`best.ckpt` by a monitored value of validation; a model without validation has no best, and keeps `last.ckpt`."""

    def __init__(self, dirpath: str, monitor: str, mode: str, **options: Any) -> None:
        super().__init__(
            dirpath=dirpath, filename="best", monitor=monitor, mode=mode, enable_version_counter=False, **options
        )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not is_overridden("validation_step", pl_module):
            log.info("the model has no validation_step, so there will be no best.ckpt; last.ckpt is kept")
            self.monitor, self.save_top_k = None, 0
        super().setup(trainer, pl_module, stage)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self.monitor is not None and self.monitor not in logged:
            raise ConfigError(
                f"the best checkpoint is chosen by {self.monitor!r}, which the model does not log; it logs "
                f"{', '.join(sorted(logged)) or 'nothing'}; set monitor=<one of them> monitor_mode=min or max"
            )
        super().on_validation_end(trainer, pl_module)
