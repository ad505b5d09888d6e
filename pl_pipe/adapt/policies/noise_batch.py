"""The noise scale changes the batch size. GradientNoiseScale -> *NoiseBatchPolicy* -> data loaders, learning rates."""

from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import BatchSampler, DataLoader
from typing_extensions import override

from pl_pipe.adapt.learning_rates import scale_rates
from pl_pipe.adapt.monitors.base import require_whole_gradients
from pl_pipe.adapt.monitors.noise_scale import GradientNoiseScale
from pl_pipe.adapt.policies.base import STOP, Policy, made_of
from pl_pipe.adapt.policies.batch_size import BatchSizeRule
from pl_pipe.adapt.resizable_batches import ResizableBatches
from pl_pipe.checks import check_whole
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class ResizeBatch:
    """Samples a rank and batch from the next one on, and what learning rates are multiplied by; between two steps."""

    size: int
    rate_factor: float = 1.0

    def apply(self, trainer: L.Trainer) -> None:
        samplers = batch_samplers(trainer)
        before = [sampler.batch_size for sampler in samplers]
        within = any(isinstance(sampler, ResizableBatches) and sampler.drawn_batches for sampler in samplers)
        try:
            for sampler in samplers:
                sampler.batch_size = self.size
            if not (within and trainer.is_last_batch):  # then it is the next epoch's
                count_anew(trainer)
        except Exception:
            for sampler, size in zip(samplers, before, strict=True):
                sampler.batch_size = size
            raise
        if within:
            _end_if_nothing_is_left(trainer)
        scale_rates(trainer, self.rate_factor)
        if trainer.is_global_zero:
            log.info("batch size: %d a rank, learning rates times %.3g", self.size, self.rate_factor)


class NoiseBatchPolicy(Policy):
    """The global batch follows the noise scale. Training goes on from a checkpoint with its size."""

    def __init__(
        self,
        *,
        on_error: str = STOP,
        every_steps: int | None = None,
        interval: int | None = None,
        keep: float | None = None,
        **rule: Any,
    ) -> None:
        """
        Args:
            every_steps: between decisions, also within an epoch; None is before each epoch.
            interval: steps from one measurement of the noise scale to the next; None is that of the GradientNoiseScale
                among the callbacks, or its default.
            keep: how much of its averages that measurement keeps; None as above.
            rule: the settings of BatchSizeRule.
        """
        if every_steps is not None:
            check_whole(every_steps=every_steps)
            if every_steps < 1:
                raise ConfigError(f"every_steps={every_steps} is no number of steps; choose 1 or more, or null")
        super().__init__(interval=every_steps, on_error=on_error)
        self.rule = made_of(BatchSizeRule, rule, whose="NoiseBatchPolicy")
        self._measuring: dict[str, Any] = {"interval": interval, "keep": keep}
        GradientNoiseScale(**{name: value for name, value in self._measuring.items() if value is not None})  # refuses
        self._monitor: GradientNoiseScale | None = None
        self._resumed: int | None = None
        self._resumed_samples = 0
        self.sizes: list[int] = []
        """The global batch size with which each epoch began."""
        self._size: int | None = None
        self._samples = 0
        """Of this rank, in the epoch so far."""
        self._has_begun = False
        """Batches of the epoch that comes may have been asked for."""

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        require_whole_gradients(self, trainer)  # before the monitor does, which the user may not have given
        self._monitor = self._measured_by(trainer.callbacks)  # type: ignore[attr-defined]
        reload: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if reload:
            raise ConfigError(
                f"trainer.reload_dataloaders_every_n_epochs={reload} would bring "
                f"back the first batch size; leave it out, or remove NoiseBatchPolicy"
            )

    def _measured_by(self, callbacks: list[Any]) -> GradientNoiseScale:
        """The user's, if there is one: a second would cost as much again, and log under the same names."""
        wanted: dict[str, Any] = {name: value for name, value in self._measuring.items() if value is not None}
        found = next((one for one in callbacks if isinstance(one, GradientNoiseScale)), None)
        if found is None:
            found = GradientNoiseScale(**wanted)
            callbacks.insert(callbacks.index(self), found)
        has = {"interval": found.interval, "keep": found.estimate.keep}
        for name, value in wanted.items():
            if value != has[name]:
                raise ConfigError(
                    f"NoiseBatchPolicy has {name}={value}, and the GradientNoiseScale by which it decides has "
                    f"{name}={has[name]}; leave the policy's out, or give both the same"
                )
        return found

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        are_new = all(type(sampler) is BatchSampler for sampler in batch_samplers(trainer))
        for sampler in batch_samplers(trainer):  # refuses what cannot be resized
            if not ResizableBatches.become(sampler) and self.interval is not None:
                raise ConfigError(
                    f"every_steps={self.interval}, but the batches of a {type(sampler).__name__} cannot change within "
                    f"an epoch; leave every_steps out, or use a DataLoader with batch_size=…"
                )
        limit = trainer.limit_train_batches
        if self.interval is not None and isinstance(limit, float) and limit != 1.0:
            raise ConfigError(
                f"every_steps={self.interval} and trainer.limit_train_batches={limit}: a share of an epoch whose "
                f"batches change is not known; give a number of batches, or leave one of them out"
            )
        size, least, most = self._global_size(trainer), self.rule.least, self.rule.most
        if self._resumed is None and not least <= size <= most:
            raise ConfigError(
                f"training begins with {size} samples of all ranks a step, and least={least} and most={most} are the "
                f"limits; change one of them, or the loader's batch_size"
            )
        is_taken_over = are_new and self._resumed is None and _take_over(trainer)
        if self._resumed is not None and self._resumed != size:
            ResizeBatch(max(1, self._resumed // self._parts(trainer))).apply(trainer)
        self._resumed = None
        self._go_on_within_epoch(trainer)
        if not is_taken_over:
            fetcher: Any = trainer.fit_loop._data_fetcher
            iter(fetcher)  # workers may have been asked for batches of the old size, which nobody counted
        self._has_begun = True

    def _go_on_within_epoch(self, trainer: L.Trainer) -> None:
        """Of an epoch in whose middle a checkpoint was made, Lightning knows the batches, which had several sizes."""
        done = trainer.fit_loop.epoch_loop.batch_progress
        samples, self._resumed_samples = self._resumed_samples, 0
        if not samples or not done.current.ready or done.is_last_batch:
            return
        for sampler in batch_samplers(trainer):
            if isinstance(sampler, ResizableBatches):
                sampler.go_on_after(done.current.ready, samples)
        count_anew(trainer)

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._has_begun:
            begin_anew(trainer)
        self._has_begun = False
        super().on_train_epoch_start(trainer, pl_module)
        self._size = self._global_size(trainer)
        self.sizes.append(self._size)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_begun = False  # an epoch that is gone on with in its middle has no start

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._size = self._global_size(trainer)
        first = batch_samplers(trainer)[0]
        self._samples = first.samples_of(batch_idx + 1) if isinstance(first, ResizableBatches) else 0

    @override
    def decide(self, trainer: L.Trainer) -> ResizeBatch | None:
        assert self._monitor is not None
        present, noise_scale = self._global_size(trainer), self._monitor.noise_scale
        parts = self._parts(trainer)
        wanted = self.rule.size(present, noise_scale, multiple=parts, samples=_epoch_samples(trainer))
        if wanted == present:
            return None
        return ResizeBatch(wanted // parts, self.rule.rate_factor(present, wanted, noise_scale))

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"size": self._size, "samples": self._samples} if self._size else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed, self._resumed_samples = state_dict.get("size"), state_dict.get("samples", 0)

    def _global_size(self, trainer: L.Trainer) -> int:
        return batch_samplers(trainer)[0].batch_size * self._parts(trainer)

    @staticmethod
    def _parts(trainer: L.Trainer) -> int:
        return trainer.world_size * trainer.accumulate_grad_batches


def batch_samplers(trainer: L.Trainer) -> list[BatchSampler]:
    """Of the training loaders; refuses loaders whose batches are not made by one that can be resized."""
    combined = trainer.fit_loop._combined_loader
    assert combined is not None
    found: list[BatchSampler] = []
    for loader in combined.flattened:
        sampler: Any = getattr(loader, "batch_sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(getattr(sampler, "batch_size", None), int):
            raise ConfigError(
                f"the batch size of a {type(loader).__name__} over {type(getattr(loader, 'dataset', None)).__name__} "
                f"cannot be changed: it has no batch sampler with a batch_size; use a DataLoader over a map-style data "
                f"set with batch_size=…"
            )
        found.append(sampler)
    if len({sampler.batch_size for sampler in found}) != 1:
        sizes = [sampler.batch_size for sampler in found]
        raise ConfigError(f"the training loaders have different batch sizes ({sizes}); give them one")
    return found


def _epoch_samples(trainer: L.Trainer) -> int | None:
    """Of all ranks together, as far as that is known."""
    orders: list[Any] = [getattr(batches, "sampler", None) for batches in batch_samplers(trainer)]
    known = [len(order) for order in orders if hasattr(order, "__len__")]
    return min(known) * trainer.world_size if known else None


def _take_over(trainer: L.Trainer) -> bool:
    """Loaders go on as they have begun; anew, they would draw other random numbers than without a policy."""
    combined = trainer.fit_loop._combined_loader
    iterators = getattr(getattr(combined, "_iterator", None), "iterators", [])
    samplers = batch_samplers(trainer)
    return len(iterators) == len(samplers) and all(
        isinstance(sampler, ResizableBatches) and sampler.take_over(iterator)
        for sampler, iterator in zip(samplers, iterators, strict=True)
    )


def begin_anew(trainer: L.Trainer) -> None:
    """A whole epoch is to come, which Lightning will not count by itself."""
    for sampler in batch_samplers(trainer):
        if isinstance(sampler, ResizableBatches):
            sampler.begin_anew()
    count_anew(trainer)


def count_anew(trainer: L.Trainer) -> None:
    """The epoch's length, as Lightning counted it when it made the loaders; also in the middle of the epoch."""
    loop = trainer.fit_loop
    combined = loop._combined_loader
    assert combined is not None
    stage = RunningStage.TRAINING
    limits = [_parse_num_batches(stage, len(loader), trainer.limit_train_batches) for loader in combined.flattened]
    combined.limits = limits
    shortest = combined._mode == "min_size"  # `len(combined)` counts by the limits of the last epoch
    loop.max_batches = min(limits) if shortest else max(limits)
    if combined._iterator is not None:
        combined._iterator.limits = list(limits)
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = int(loop.max_batches)
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))
    elif trainer.check_val_every_n_epoch is not None and trainer.val_check_interval is not None:
        trainer.val_check_batch = min(trainer.val_check_interval, loop.max_batches)


def _end_if_nothing_is_left(trainer: L.Trainer) -> None:
    """Of a loader that drops a batch that is too small: what is left may have become one."""
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher
    if fetcher is not None and fetcher.length is not None and fetcher.fetched >= fetcher.length:
        fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = True
