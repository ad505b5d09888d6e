"""A progress bar is told the best of all variants: at once where numbers are the host's, later where they must come."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
from typing_extensions import override

from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import trainer_metrics
from pl_pipe.strategies.fusion.late_numbers import LateNumbers
from tests.fused_modules import Classifier, loader, trainer

VARIANTS = [{"lr": 0.1}, {"lr": 0.03}, {"lr": 0.01}]
_STEP, _EPOCH = "train_loss_step", "train_loss_epoch"


class Bar(L.Callback):
    """Asks at every step, as a progress bar does."""

    def __init__(self) -> None:
        self.shown: list[float | None] = []
        self.best: list[float] = []
        self.at_ends: list[dict[str, Any]] = []

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.shown.append(trainer.progress_bar_metrics.get(_STEP))
        found = trainer._logger_connector.metrics["callback"]
        self.best.append(min(float(found[f"{_STEP}/variant_{number}"]) for number in range(len(VARIANTS))))

    @override
    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.at_ends.append(dict(trainer.progress_bar_metrics))


class Slow(LateNumbers):
    """Arrive when they have been asked for twice."""

    def __init__(self, values: Sequence[Any]) -> None:
        super().__init__(values)
        self._asked = 0

    @property
    def have_arrived(self) -> bool:
        self._asked += 1
        return self._asked > 2


def shown(epochs: int = 2) -> tuple[Bar, L.Trainer]:
    L.seed_everything(1, verbose=False)
    bar = Bar()
    running = trainer(strategy=FusionStrategy(VARIANTS), callbacks=[bar], max_epochs=epochs)
    running.fit(Classifier(), loader(seed=5), loader(shuffle=False))
    return bar, running


def test_numbers_of_the_host_are_shown_at_once() -> None:
    bar, running = shown()
    assert bar.shown == bar.best
    assert [found[_STEP] for found in bar.at_ends] == [bar.best[len(bar.best) // 2 - 1], bar.best[-1]]
    assert running.progress_bar_metrics[_EPOCH] == pytest.approx(float(running.callback_metrics[_EPOCH]))


def test_numbers_that_are_late_are_shown_when_they_arrive_and_are_right_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_metrics, "LateNumbers", Slow)
    bar, running = shown()
    assert bar.shown[0] is None
    steps = [bar.best.index(value) for value in bar.shown if value is not None]
    assert steps == sorted(steps)
    behind = [step - found for step, found in enumerate(steps, len(bar.shown) - len(steps))]
    assert 0 < max(behind) <= 4
    assert [found[_STEP] for found in bar.at_ends] == [bar.best[len(bar.best) // 2 - 1], bar.best[-1]]
    monkeypatch.undo()
    _, exact = shown()
    assert running.progress_bar_metrics == exact.progress_bar_metrics


def test_what_was_shown_is_not_shown_in_the_next_run() -> None:
    _, running = shown(epochs=1)
    running.validate(running.strategy.variants[0], loader(shuffle=False), verbose=False)  # type: ignore[attr-defined]
    assert set(running.progress_bar_metrics) == {"val_loss", "val_acc"}
