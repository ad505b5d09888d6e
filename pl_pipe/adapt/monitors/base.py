"""What monitors have in common: an interval, their latest numbers, and loggers. trainer -> *Monitor* -> loggers."""

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch.distributed import default_pg_timeout

from pl_pipe.checks import check_whole
from pl_pipe.errors import ConfigError


class Monitor(L.Callback):
    """A callback that measures, and decides nothing."""

    def __init__(self, *, interval: int = 1) -> None:
        """
        Args:
            interval: optimizer steps from one measurement to the next.
        """
        check_whole(interval=interval)
        if interval < 1:
            raise ConfigError(f"{type(self).__name__}: interval={interval} is no number of steps; choose 1 or more")
        self.interval = interval
        self.values: dict[str, float] = {}
        """The latest, by the name they are logged under."""
        self._steps: int | None = None

    def is_due(self, trainer: L.Trainer) -> bool:
        """Whether the step that is being made is to be measured: on all ranks alike."""
        return trainer.global_step % self.interval == 0

    def was_due(self, trainer: L.Trainer) -> bool:
        """After a batch that ended in steps, one of each optimizer: whether one of them was to be measured."""
        before, self._steps = self._steps, trainer.global_step
        if before is None or before >= self._steps:  # the first batch of this run
            before = self._steps - max(1, len(trainer.optimizers))
        return -(-before // self.interval) * self.interval < self._steps

    def is_step(self, trainer: L.Trainer) -> bool:
        """Whether the present batch is the one that ends in an optimizer step."""
        return not trainer.fit_loop._should_accumulate()

    def report(self, trainer: L.Trainer, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Keeps the numbers, and gives those that are numbers to the loggers, `metrics.csv` among them."""
        self.values = {name: float(value) for name, value in values.items()}
        shown = {name: value for name, value in self.values.items() if math.isfinite(value)}
        if not shown or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=trainer.global_step if step is None else step)


def samples_of(batch: Any, callback: L.Callback) -> int:
    """By its first tensor, as Lightning counts."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException as error:
        name = type(callback).__name__
        raise ConfigError(
            f"{name} counts a batch's samples, and Lightning finds no tensor in {type(batch).__name__}; have the "
            f"loader give tensors, or lists or dicts of them, or remove {name}"
        ) from error


def patience_of(trainer: L.Trainer) -> timedelta:
    """How long ranks wait for each other under this strategy, and so wherever else they meet."""
    strategy: Any = trainer.strategy
    faults = getattr(strategy, "faults", None)
    if faults is not None:
        return timedelta(seconds=faults.timeout_s)
    given: timedelta | None = getattr(strategy, "_timeout", None)
    return given or default_pg_timeout


def require_equal_steps(callback: L.Callback, trainer: L.Trainer) -> None:
    """Refuses strategies whose workers take different numbers of steps: one would wait where others never come."""
    strategy = trainer.strategy
    if not getattr(strategy, "saves_within_epochs", True):
        raise ConfigError(
            f"{type(callback).__name__} has all ranks meet after a step, and the workers of {type(strategy).__name__} "
            f"do not wait for each other; remove it, or set strategy=adaptive or ddp"
        )


def require_whole_gradients(monitor: L.Callback, trainer: L.Trainer) -> None:
    """Refuses strategies under which a rank does not have every gradient, and gradients that are no gradients."""
    name, strategy = type(monitor).__name__, trainer.strategy
    whole = isinstance(strategy, DDPStrategy | SingleDeviceStrategy) and getattr(strategy, "has_whole_gradients", True)
    if not whole:
        raise ConfigError(
            f"{name} compares the ranks' gradients of one whole model with their mean, which {type(strategy).__name__} "
            f"does not have; remove it, or set strategy=adaptive, ddp or single"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise ConfigError(
            f"{name} cannot read gradients that are scaled, as with precision={trainer.precision}; set "
            f"precision=bf16-mixed, or remove it"
        )
    if not trainer.lightning_module.automatic_optimization:
        raise ConfigError(
            f"{name} reads gradients where Lightning makes the step, and {type(trainer.lightning_module).__name__} has "
            f"automatic_optimization=False; remove it"
        )
