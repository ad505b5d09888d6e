"""What a pipeline cannot do, refused before training starts: the fact, the value, the remedy."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    SpikeDetection,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.schedule import FLUSHING
from pl_pipe.strategies.pipeline.plan import EVALUATION
from pl_pipe.strategies.pipeline.trainer_parts import why_in_lockstep
from pl_pipe.tensors import refuse_lazy

log = get_logger(__name__)


def check_model(trainer: L.Trainer, module: L.LightningModule, *, schedule: str) -> None:
    """Before the model is divided."""
    refuse_lazy(module)
    why = why_in_lockstep(module)
    if why is not None and schedule not in FLUSHING:
        raise ConfigError(
            f"{why}, so its steps run backward themselves, but under schedule={schedule} the backward of a batch comes "
            f"when others have entered; set schedule=1f1b"
        )
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ConfigError(
            f"precision={plugin.precision} scales the loss by a GradScaler, which every stage would do on its own; set "
            f"precision=bf16-mixed or 32-true"
        )
    if getattr(trainer.strategy, "_layer_sync", None) is not None:
        raise ConfigError(
            "sync_batchnorm=true makes every batch norm wait for all ranks, which run different layers; leave it out: "
            "the replicas of a stage average their statistics when the pipeline is drained"
        )
    synchronized = [part for part, inner in module.named_modules() if isinstance(inner, torch.nn.SyncBatchNorm)]
    if synchronized and trainer.world_size > 1:
        raise ConfigError(
            f"{synchronized[0]} is a SyncBatchNorm, which waits for all ranks, but those run different layers; use "
            f"BatchNorm: the replicas of a stage average their statistics when the pipeline is drained"
        )
    interval_s = getattr(trainer, "_val_check_time_interval", None)
    if interval_s is not None:
        raise ConfigError(
            f"val_check_interval={interval_s:g} s is a time, on which the ranks' clocks need not agree; "
            f"give a number of batches"
        )


def refuse_iterators(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Steps that fetch their batches themselves."""
    assert trainer.state.fn is not None
    fitting = trainer.state.fn is TrainerFn.FITTING
    for hook in ("training_step", "validation_step") if fitting else EVALUATION[trainer.state.fn][1:]:
        if is_param_in_hook_signature(getattr(module, hook), "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{type(module).__name__}.{hook} takes the data loader's iterator (dataloader_iter); a pipeline hands "
                f"batches to all its stages, so take (batch, batch_idx)"
            )


def check_callbacks(callbacks: Iterable[L.Callback], *, schedule: str, module: L.LightningModule | None = None) -> None:
    """Those that want the whole model, or a decision of all ranks, after any batch."""
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            raise ConfigError(
                f"{name} compares the values of all parameters when it unfreezes some, and each rank of a pipeline has "
                f"one stage's; freeze modules in the model itself (requires_grad_(False)) and give the optimizer all "
                f"parameters"
            )
        if isinstance(callback, ModelPruning):
            raise ConfigError(
                f"{name} looks at the weights of the whole model, of which each rank of a pipeline has one stage; "
                f"prune the model before or after training"
            )
        if isinstance(callback, SpikeDetection):
            raise ConfigError(
                f"{name} compares the loss on every rank, and only rank 0 of a pipeline has it; raise in a callback of "
                f"your own on rank 0 alone (if trainer.is_global_zero), which ends all"
            )
        if isinstance(callback, LearningRateFinder) and schedule not in FLUSHING:
            raise ConfigError(
                f"{name} asks all ranks after every batch whether to stop, for which schedule={schedule} must not "
                f"wait; set schedule=1f1b, or find the rate on one device first, with "
                f"Tuner(Trainer(devices=1)).lr_find(model)"
            )
        if isinstance(callback, GradientAccumulationScheduler) and schedule not in FLUSHING:
            raise ConfigError(
                f"{name}(scheduling={callback.scheduling}) changes how many batches share an update, while others are "
                f"in flight under schedule={schedule}; set accumulate_grad_batches for the whole run, or schedule=1f1b"
            )
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging) and schedule not in FLUSHING:
            raise ConfigError(
                f"{name} averages the weights after a batch, while under schedule={schedule} each stage has made "
                f"another number of updates; set schedule=1f1b"
            )
        if (
            isinstance(callback, StochasticWeightAveraging)
            and module
            and callback.pl_module_contains_batch_norm(module)
        ):
            raise ConfigError(
                f"{name} runs a last epoch without a backward, for the batch norms of {type(module).__name__}, which a "
                f"pipeline cannot; use WeightAveraging(use_buffers=True), or train with Trainer(strategy='ddp')"
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ConfigError(
                f"{name}(train_time_interval={callback._train_time_interval}) asks all ranks after every batch, for "
                f"which a pipeline must not wait; set every_n_train_steps"
            )


def refuse_batch_size_finder(callbacks: Iterable[L.Callback]) -> None:
    """Before Lightning does, which names no way out."""
    for callback in callbacks:
        if isinstance(callback, BatchSizeFinder):
            raise ConfigError(
                f"{type(callback).__name__} tries batches on one device only; find the size first, with "
                f"Tuner(Trainer(devices=1)).scale_batch_size(model, datamodule=...), and leave it out here"
            )


def nothing_is_saved(trainer: L.Trainer, stack: ExitStack) -> None:
    """After a fault, until the stack is closed: callbacks may want to save, for which all stages would be needed."""

    def refuse(filepath: Any, *_: Any, **__: Any) -> None:
        log.warning("%s is not saved: after an error the ranks have parts of different batches", filepath)

    vars(trainer)["save_checkpoint"] = refuse
    stack.callback(vars(trainer).pop, "save_checkpoint", None)


def check_loggers(loggers: Iterable[Logger]) -> None:
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and logger._log_graph:
            raise ConfigError(
                f"{type(logger).__name__}(log_graph=True) traces the whole model on one rank, which has one stage; "
                f"leave log_graph out"
            )


def check_optimizers(trainer: L.Trainer) -> None:
    """After `configure_optimizers`."""
    optimizers = trainer.strategy.optimizers
    known = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none of "
                    f"{type(trainer.lightning_module).__name__}'s own, so it belongs to no stage; make it an attribute "
                    f"of a module (nn.ParameterList for a list)"
                )
    if optimizers and isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigError(
            "LBFGS evaluates the step several times for one update, which a pipeline cannot; choose another optimizer"
        )
    for config in trainer.strategy.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "step":
            raise ConfigError(
                f"{type(config.scheduler).__name__} on {config.monitor} with interval=step needs the metric on every "
                f"rank after every batch, but ranks learn metrics when the pipeline is drained; set interval=epoch"
            )
