"""What workers at different batches cannot do, refused before training starts: the fact, the value, the remedy."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from pl_pipe.comm.synchronizers.wave import check_servers
from pl_pipe.errors import ConfigError
from pl_pipe.grouping import matchings
from pl_pipe.strategies.uneven.settings import UnevenSettings
from pl_pipe.tensors import refuse_lazy


def check_workers(settings: UnevenSettings, workers: int, trainer: Any) -> None:
    """Whether so many can train by the rule; any number can evaluate."""
    if trainer is None or trainer.state.fn is not TrainerFn.FITTING:
        return
    if workers < 2:
        raise ConfigError(
            f"synchronizer={settings.synchronizer} averages among workers, and there is {workers}; set "
            f"trainer.devices=2 or more, or choose strategy=single"
        )
    if settings.matching:
        next(matchings(range(workers)))
    check_servers(settings.servers, workers)


def check_model(trainer: L.Trainer, module: L.LightningModule) -> None:
    name = type(module).__name__
    refuse_lazy(module)
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name} sets automatic_optimization=False, so that nobody knows where a step ends after which workers "
            f"average; let Lightning optimize (automatic_optimization=True), or choose strategy=ddp"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            f"{name}.training_step takes the data loader's iterator (dataloader_iter), and may take any number of "
            f"batches; take (batch, batch_idx)"
        )
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        raise ConfigError(
            f"precision={plugin.precision} scales every worker's loss by a factor of its own; set "
            f"precision=bf16-mixed or 32-true"
        )
    synchronized = [part for part, inner in module.named_modules() if isinstance(inner, torch.nn.SyncBatchNorm)]
    if synchronized or getattr(trainer.strategy, "_layer_sync", None) is not None:
        what = f"{synchronized[0]} is a SyncBatchNorm" if synchronized else "sync_batchnorm=true"
        raise ConfigError(
            f"{what}, which waits for all workers in every layer; use BatchNorm: statistics are averaged when all meet"
        )
    complex_ = [part for part, tensor in module.named_parameters() if tensor.is_complex()]
    if complex_:
        raise ConfigError(f"parameter {complex_[0]} is complex, and cannot be averaged here; choose strategy=ddp")


def check_optimizers(trainer: L.Trainer) -> None:
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.strategy.optimizers):
        raise ConfigError("LBFGS evaluates the step several times for one update; choose another optimizer")


def check_trainer(trainer: Any, settings: UnevenSettings) -> None:
    """Options that need all workers at the same batch."""
    if not settings.lockstep:
        check_epochs(trainer, f"synchronizer={settings.synchronizer} lets workers do different numbers of batches")


def check_epochs(trainer: Any, why: str) -> None:
    """Options that need workers to meet within an epoch, which do not, and why."""
    interval_s = getattr(trainer, "_val_check_time_interval", None)
    if interval_s is not None or trainer.val_check_interval not in (1.0, None) or not trainer.check_val_every_n_epoch:
        interval = f"{interval_s:g} s" if interval_s is not None else trainer.val_check_interval
        raise ConfigError(
            f"val_check_interval={interval}, check_val_every_n_epoch={trainer.check_val_every_n_epoch}, but {why}, and "
            f"they meet at the end of an epoch; leave the first out, and give a number for the second"
        )
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and callback._every_n_train_steps >= 1:
            raise ConfigError(
                f"{name}(every_n_train_steps={callback._every_n_train_steps}), but {why}; set every_n_epochs"
            )
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            raise ConfigError(
                f"{name}(train_time_interval={callback._train_time_interval}), but {why}; set every_n_epochs"
            )
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ConfigError(f"{name} averages over steps of its own, but {why}; leave it out, or choose strategy=ddp")
        if isinstance(callback, LearningRateFinder):
            raise ConfigError(f"{name} trains on trial, but {why}; find the rate with strategy=single")


def batches_of(loader: Any) -> tuple[int, int, bool]:
    """How many samples a training loader has, how many in a batch, and whether a smaller last batch is left out."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise TypeError(type(loader).__name__)
    order = loader.sampler
    if isinstance(order, DistributedSampler) and order.num_replicas > 1:
        raise ConfigError(
            f"the training loader's {type(order).__name__} keeps one of {order.num_replicas} parts of the data for "
            f"each rank, but batches go to whoever is free; leave the sampler out (shuffle=True shuffles), or set "
            f"trainer.use_distributed_sampler=false and let each rank keep its part"
        )
    sampler = loader.batch_sampler
    if sampler is None:
        return len(loader.sampler), 1, False  # type: ignore[arg-type]  # the data set gives whole batches
    if type(sampler) is BatchSampler:
        return len(loader.sampler), int(sampler.batch_size), bool(sampler.drop_last)  # type: ignore[arg-type]
    raise ConfigError(
        f"the training loader has a batch sampler of its own ({type(sampler).__name__}), and workers that take batches "
        f"as they come need to number them; give the DataLoader a batch_size and a sampler, or set "
        f"trainer.use_distributed_sampler=false and let each worker's loader have its own share"
    )
