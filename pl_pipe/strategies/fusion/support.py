"""What fused variants cannot do, refused before training starts: the fact, the value, the remedy."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pl_pipe.errors import ConfigError
from pl_pipe.strategies.fusion.variant_hooks import overrides
from pl_pipe.tensors import refuse_lazy

_OF_ONE_MODEL = (BaseFinetuning, LearningRateFinder, ModelPruning, StochasticWeightAveraging, WeightAveraging)


def check_model(module: L.LightningModule) -> None:
    name = type(module).__name__
    refuse_lazy(module)
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, so its training_step runs backward and the optimizer itself, "
            "which cannot be done for all variants at once; let Lightning optimize (automatic_optimization=True), or "
            "choose strategy=single"
        )
    for hook in ("backward", "optimizer_step"):
        if overrides(module, hook):
            raise ConfigError(
                f"{name} overrides {hook}(), which fused variants do for all at once; remove the override (a "
                "learning-rate scheduler with interval=step can warm up), or choose strategy=single"
            )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{name}.training_step takes the data loader's iterator (dataloader_iter); all variants are given the same "
            "batch, so take (batch, batch_idx)"
        )


def check_trainer(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, _OF_ONE_MODEL):
            raise ConfigError(
                f"{type(callback).__name__} changes one model, and fused variants are several; leave it out, or choose "
                "strategy=single"
            )
