"""A progress bar is told the best of all variants: at once where numbers are the host's, later where they must come."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
from typing_extensions import override

from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import trainer_metrics, variant_records
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


@pytest.mark.parametrize("is_late", [False, True])
def test_without_a_validation_the_last_step_is_shown_in_the_end(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_late:
        monkeypatch.setattr(trainer_metrics, "LateNumbers", Slow)
    for callbacks in ([], [Bar()]):
        L.seed_everything(1, verbose=False)
        fused = FusionStrategy(VARIANTS)
        running = trainer(strategy=fused, callbacks=list(callbacks), log_every_n_steps=1)
        running.fit(Classifier(), loader(seed=5))
        assert set(running.progress_bar_metrics) == {_STEP, _EPOCH}
        last = [fused.records.curves[number][_STEP][-1][1] for number in range(len(VARIANTS))]
        assert running.progress_bar_metrics[_STEP] == min(last)


class Interruption(L.Callback):
    def __init__(self, error: BaseException) -> None:
        self._error = error

    @override
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            raise self._error


@pytest.mark.parametrize("error", [RuntimeError("interrupted"), KeyboardInterrupt()], ids=["error", "keyboard"])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_run_leaves_names_that_users_know(
    error: BaseException, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_late:
        monkeypatch.setattr(trainer_metrics, "LateNumbers", Slow)
    L.seed_everything(1, verbose=False)
    bar = Bar()
    running = trainer(strategy=FusionStrategy(VARIANTS), callbacks=[bar, Interruption(error)])
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        running.fit(Classifier(), loader(seed=5), loader(shuffle=False))
    known = {_STEP, *(f"{_STEP}/variant_{number}" for number in range(len(VARIANTS)))}
    assert set(running.progress_bar_metrics) == {_STEP}
    assert running.progress_bar_metrics[_STEP] == bar.best[-1]
    assert known <= set(running.callback_metrics)
    assert not [name for name in (*running.callback_metrics, *running.logged_metrics) if name.endswith("0_step")]


class Watching(L.Callback):
    def __init__(self) -> None:
        self.known: list[bool] = []

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.known.append("val_loss" in trainer.callback_metrics)


def test_a_sanity_check_leaves_no_metrics() -> None:
    """By which a checkpoint of the first epoch would be thought the best."""
    watching = Watching()
    running = trainer(strategy=FusionStrategy(VARIANTS), callbacks=[watching], max_epochs=2)
    running.fit(Classifier(), loader(seed=5), loader(shuffle=False))
    half = len(watching.known) // 2
    assert watching.known == [False] * half + [True] * half


class Stepwise(L.Callback):
    """What plain Lightning has after each step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []
        self.validated: list[tuple[int, float]] = []
        self._step = 0

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.found.append((self._step, float(trainer.callback_metrics[_STEP])))

    @override
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.validated.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))


class AtTheEnd(Classifier):
    """Logs at an epoch's end what callbacks are not told any more."""

    @override
    def on_train_epoch_end(self) -> None:
        self.log("ended", float(self.current_epoch))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=str)
def test_curves_have_what_was_logged_and_when(options: dict[str, Any]) -> None:
    options = {"log_every_n_steps": 1, "max_epochs": 2, **options}
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS)
    trainer(strategy=fused, **options).fit(AtTheEnd(), loader(seed=5), loader(shuffle=False))
    for number, variant in enumerate(VARIANTS):
        L.seed_everything(1, verbose=False)
        plain = Stepwise()
        trainer(callbacks=[plain], **options).fit(AtTheEnd(**variant), loader(seed=5), loader(shuffle=False))
        curves = fused.records.curves[number]
        for curve, expected in ((curves[_STEP], plain.found), (curves["val_loss"], plain.validated)):
            assert [step for step, _ in curve] == [step for step, _ in expected]
            assert [value for _, value in curve] == pytest.approx([value for _, value in expected], rel=1e-9)
        assert curves["ended"] == [(step, float(epoch)) for epoch, (step, _) in enumerate(plain.validated)]


def test_notes_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(LateNumbers):
        have_arrived = False  # type: ignore[assignment]

        @override
        def read(self) -> list[float]:
            reads.append(self)
            return super().read()

    reads: list[Any] = []
    monkeypatch.setattr(variant_records, "LateNumbers", Never)
    records = variant_records.VariantRecords([{}], monitor=None, mode=None)
    for step in range(5):
        records.note({"loss/variant_0": 5.0 - step}, step)
    assert not reads
    assert records.curves == {0: {"loss": [(step, 5.0 - step) for step in range(5)]}}
