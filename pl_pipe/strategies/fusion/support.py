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

from pl_pipe.errors import OTHER_LIGHTNING, ConfigError
from pl_pipe.strategies.fusion.settings import AUTO, ONE_BY_ONE, WITHOUT_FUSION
from pl_pipe.tensors import refuse_lazy

_OF_ONE_MODEL = (BaseFinetuning, LearningRateFinder, ModelPruning, StochasticWeightAveraging, WeightAveraging)


def check_model(module: L.LightningModule) -> None:
    name = type(module).__name__
    refuse_lazy(module)
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{name}.training_step takes the data loader's iterator (dataloader_iter); all variants are given the same "
            "batch, so take (batch, batch_idx)"
        )


def check_turns(why: str, module: L.LightningModule, *, formulation: str, is_ddp: bool) -> None:
    """Variants are trained one after another."""
    name = type(module).__name__
    if is_ddp:
        raise ConfigError(
            f"{name}: {why}, for which variants are trained one after another, and that on one device only; use "
            "FusionStrategy with devices=1 (strategy=fusion trainer.devices=1 on the command line)"
        )
    if formulation not in (AUTO, ONE_BY_ONE):
        raise ConfigError(
            f"formulation={formulation} computes the steps of all variants at once, which {name}'s cannot be: {why}; "
            "leave formulation out"
        )


def check_lightning(part: object) -> None:
    """A module, data module or the like whose class is derived from the other copy of Lightning."""
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(part).__mro__):
        raise ConfigError(f"{type(part).__name__} is of pytorch_lightning: {OTHER_LIGHTNING}")


def check_trainer(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, _OF_ONE_MODEL):
            raise ConfigError(
                f"{type(callback).__name__} changes one model, and fused variants are several; leave it out, or train "
                f"them one by one by {WITHOUT_FUSION}"
            )
