"""What a pipeline cannot do, refused before training starts: the fact, the value, the remedy."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
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
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.schedule import FLUSHING
from pl_pipe.tensors import refuse_lazy

log = get_logger(__name__)


def check_model(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Before the model is divided."""
    name = type(module).__name__
    refuse_lazy(module)
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, so its training_step runs backward and the optimizer itself, "
            f"on values that a pipeline spreads over ranks; let Lightning optimize (automatic_optimization=True), or "
            f"choose strategy=ddp"
        )
    if is_overridden("backward", module):
        raise ConfigError(
            f"{name} overrides backward(), which a pipeline runs stage by stage; remove the override, or choose "
            f"strategy=ddp"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{name}.training_step takes the data loader's iterator (dataloader_iter); a pipeline hands batches to all "
            f"its stages, so take (batch, batch_idx)"
        )
    compiled = [part or name for part, inner in module.named_modules() if _is_compiled(inner)]
    if compiled and trainer.world_size > 1:
        raise ConfigError(
            f"{compiled[0]} is compiled (torch.compile), and the compiler cannot run it for its shapes alone, as the "
            f"other stages must; give the module itself"
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


def _is_compiled(module: torch.nn.Module) -> bool:
    """By torch.compile(part), part.compile(), or as a whole, which Lightning unwraps and remembers."""
    return (
        hasattr(module, "_orig_mod")
        or module._compiled_call_impl is not None
        or getattr(module, "_compiler_ctx", None) is not None
    )


def check_callbacks(callbacks: Iterable[L.Callback], *, schedule: str) -> None:
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
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(
                f"{name} trains on trial without the pipeline's own callback; find the rate with strategy=single, and "
                f"leave it out here"
            )
        if isinstance(callback, GradientAccumulationScheduler) and schedule not in FLUSHING:
            raise ConfigError(
                f"{name}(scheduling={callback.scheduling}) changes how many batches share an update, while others are "
                f"in flight under schedule={schedule}; set accumulate_grad_batches for the whole run, or schedule=1f1b"
            )
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(
                f"{name} averages copies of the whole model, of which each rank of a pipeline has one stage; leave it "
                f"out, or choose strategy=ddp"
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ConfigError(
                f"{name}(train_time_interval={callback._train_time_interval}) asks all ranks after every batch, for "
                f"which a pipeline must not wait; set every_n_train_steps"
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


@contextmanager
def several_optimizers_refused(module: L.LightningModule) -> Iterator[None]:
    """Lightning's own refusal recommends manual optimization, which a pipeline cannot do either."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returns several optimizers; a pipeline trains with one: use "
            f"its parameter groups for several learning rates"
        ) from error


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
