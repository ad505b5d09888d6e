"""Callbacks for `strategy="fusion"`: variants that do not do well leave the array, the others go on where they are."""

import math
from typing import Any

import lightning as L
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.fusion.halving import Bracket, halving, hyperband, left_behind

_MODES = ("min", "max")


class _Monitoring(L.Callback):
    """Values of a metric at ends of epochs, as far as they are new: there need not be a validation in every epoch."""

    monitor: str
    _has_validated = False

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_validated = self._has_validated or not trainer.sanity_checking

    def _new_values(self, trainer: Any) -> dict[int, float]:
        """The monitored metric of every variant that is still trained; none where nothing new is known."""
        has_validated, self._has_validated = self._has_validated, False
        names = {number: f"{self.monitor}/variant_{number}" for number in _active(trainer, self)}
        of_training = trainer._logger_connector.metrics["callback"]
        if trainer.enable_validation and not has_validated and not all(name in of_training for name in names.values()):
            return {}
        metrics = trainer.callback_metrics
        if any(name not in metrics for name in names.values()):
            raise ConfigError(
                f"{type(self).__name__} monitors {self.monitor}, which the model does not log; it logs "
                f"{', '.join(sorted(one for one in metrics if '/variant_' not in one)) or 'nothing'}"
            )
        return {number: float(metrics[name]) for number, name in names.items()}


class SuccessiveHalving(_Monitoring):
    """Keeps one variant in `factor` after `first` epochs, of those one in `factor` after `first·factor` epochs, …

    Where no validation belongs to such an epoch, the next one's values decide.
    """

    def __init__(self, monitor: str = "val_loss", mode: str = "min", factor: int = 3, first: int = 1) -> None:
        _check_mode(mode)
        self.monitor = monitor
        self.mode = mode
        self.factor = factor
        self.first = first
        self.brackets: tuple[Bracket, ...] = ()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        last = trainer.max_epochs
        if last is None or last < 1:
            raise ConfigError(
                f"{type(self).__name__} plans by the number of epochs, and max_epochs={last}; set max_epochs"
            )
        self.brackets = self._planned(_all_numbers(trainer, self), last)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epochs = trainer.current_epoch + 1
        assert trainer.max_epochs is not None
        self.brackets = self._planned(_all_numbers(trainer, self), trainer.max_epochs)  # some may not have fitted
        values = self._new_values(trainer)
        for bracket in self.brackets:
            leaving = left_behind(bracket, epochs, values, mode=self.mode)
            _stop(trainer, leaving, f"left behind after {epochs} epochs")

    def _planned(self, numbers: list[int], last: int) -> tuple[Bracket, ...]:
        return (halving(numbers, factor=self.factor, first=self.first, last=last),)


class Hyperband(SuccessiveHalving):
    """Divides the variants among successive halvings that begin earlier or later, the last of which keeps all."""

    def __init__(self, monitor: str = "val_loss", mode: str = "min", factor: int = 3) -> None:
        super().__init__(monitor, mode, factor)

    @override
    def _planned(self, numbers: list[int], last: int) -> tuple[Bracket, ...]:
        return hyperband(numbers, factor=self.factor, last=last)


class VariantEarlyStopping(_Monitoring):
    """Early stopping for each variant by itself: one leaves when its metric has not improved for `patience` epochs.

    Only epochs with a new value count: of a validation's metric, those with a validation.
    """

    def __init__(self, monitor: str = "val_loss", mode: str = "min", patience: int = 3, min_delta: float = 0.0) -> None:
        _check_mode(mode)
        self.monitor = monitor
        self.mode = mode
        self.patience = patience
        self.min_delta = abs(min_delta)
        self._best: dict[int, float] = {}
        self._waited: dict[int, int] = {}

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        sign = -1.0 if self.mode == "max" else 1.0
        leaving = []
        for number, value in self._new_values(trainer).items():
            best = self._best.get(number, math.inf)
            if sign * value < best - self.min_delta:
                self._best[number], self._waited[number] = sign * value, 0
            else:
                self._waited[number] = self._waited.get(number, 0) + 1
            if self._waited[number] >= max(1, self.patience) or not math.isfinite(value):
                leaving.append(number)
        _stop(trainer, leaving, f"no better {self.monitor} in {self.patience} epochs")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self._best), "waited": dict(self._waited)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._best, self._waited = dict(state_dict["best"]), dict(state_dict["waited"])


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ConfigError(f"mode={mode} is unknown; choose min or max")


def _all_numbers(trainer: Any, callback: L.Callback) -> list[int]:
    """Of the array's variants, also those that had left before a run was resumed: the plan counts them."""
    return [variant.number for variant in _training(trainer, callback).variants]


def _active(trainer: Any, callback: L.Callback) -> list[int]:
    training = _training(trainer, callback)
    return [training.variants[place].number for place in training.active]


def _training(trainer: Any, callback: L.Callback) -> Any:
    training = getattr(trainer.strategy, "training", None)
    if training is None or not hasattr(trainer.strategy, "stop_variants"):
        raise ConfigError(
            f"{type(callback).__name__} stops variants, and this strategy ({type(trainer.strategy).__name__}) trains "
            "one model; set Trainer(strategy=FusionStrategy(variants=[…])) (strategy=fusion on the command line)"
        )
    return training


def _stop(trainer: Any, numbers: list[int], why: str) -> None:
    """Also where there are none: another rank may have found some, and all must hear of them."""
    trainer.strategy.stop_variants(numbers, why)
