"""Variants that leave the array: what stays equals separate runs, and so does what left, up to where it left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_pipe.callbacks.variant_stopping import Hyperband, SuccessiveHalving, VariantEarlyStopping
from pl_pipe.errors import ConfigError
from pl_pipe.fusion.halving import Rung, halving, hyperband, left_behind
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, fit_alone, fit_fused, loader, trainer

RATES = [0.1, 1e-5, 0.03, 1e-4]


def test_rungs_of_a_halving() -> None:
    assert halving(range(9), factor=3, last=9).rungs == (Rung(1, 3), Rung(3, 1))
    assert halving(range(9), factor=3, last=3).rungs == (Rung(1, 3),)
    assert halving(range(5), factor=2, first=2, last=100).rungs == (Rung(2, 2), Rung(4, 1))
    with pytest.raises(ConfigError, match="factor=1"):
        halving(range(3), factor=1, last=3)


def test_brackets_of_hyperband_hold_every_variant_once() -> None:
    brackets = hyperband(range(22), factor=3, last=9)
    assert [number for bracket in brackets for number in bracket.numbers] == list(range(22))
    assert [len(bracket.numbers) for bracket in brackets] == [12, 6, 4]  # in proportion to 9, 5 and 3
    assert brackets[0].rungs == (Rung(1, 4), Rung(3, 1))
    assert brackets[1].rungs == (Rung(3, 2),)
    assert brackets[2].rungs == ()


def test_the_worst_are_left_behind_and_what_is_no_number_first() -> None:
    bracket = halving(range(4), factor=2, last=8)
    values = {0: 1.0, 1: float("nan"), 2: 3.0, 3: 2.0}
    assert left_behind(bracket, 1, values, mode="min") == [1, 2]
    assert left_behind(bracket, 1, values, mode="max") == [0, 1]
    assert left_behind(bracket, 0, values, mode="min") == []


def test_a_rung_without_new_values_is_made_up_for() -> None:
    bracket = halving(range(9), factor=3, last=9)
    values = {number: float(number) for number in range(9)}
    assert left_behind(bracket, 2, values, mode="min") == [3, 4, 5, 6, 7, 8]
    assert left_behind(bracket, 2, {number: values[number] for number in range(3)}, mode="min") == []
    assert left_behind(bracket, 4, values, mode="min") == [1, 2, 3, 4, 5, 6, 7, 8]


def test_after_a_resume_the_plan_is_still_that_of_all() -> None:
    """Two of four have left; made of the other two, it would have no rung after the first epoch."""
    training = SimpleNamespace(variants=[SimpleNamespace(number=number) for number in range(4)], active=[0, 2])
    resumed: Any = SimpleNamespace(max_epochs=3, strategy=SimpleNamespace(training=training, stop_variants=None))
    halve, module = SuccessiveHalving(factor=2), Classifier()
    halve.on_train_start(resumed, module)
    assert halve.brackets == (halving(range(4), factor=2, last=3),)


@pytest.mark.parametrize("formulation", ["array", "auto"])
def test_survivors_go_on_and_the_others_are_as_they_left(formulation: str) -> None:
    variants = [{"lr": lr, "dropout": 0.2} for lr in RATES]
    halve = SuccessiveHalving(factor=2, first=1)
    widths: list[int] = []

    class Watch(L.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            widths.append(len(trainer.strategy.training.array))

    options = {"callbacks": [halve, Watch()], "max_epochs": 3}
    fused, _ = fit_fused(variants, options=options, strategy={"formulation": formulation})
    assert widths == [4, 2, 1]
    ends = {row.number: row.steps for row in fused.leaderboard.rows}
    assert sorted(ends.values()) == [7, 7, 14, 21]
    for number, variant in enumerate(variants):
        alone, _ = fit_alone(variant, options={"max_epochs": ends[number] // 7, "limit_val_batches": 1.0})
        assert difference(alone, fused.variants[number]) <= 1e-9, number
    assert ends[1] == 7
    assert [row.status for row in fused.leaderboard.rows if row.number == 1] == ["left behind after 1 epochs"]


def test_hyperband_in_an_array() -> None:
    fused, _ = fit_fused(
        [{"lr": lr} for lr in (*RATES, 0.2, 0.05)], options={"callbacks": [Hyperband(factor=2)], "max_epochs": 4}
    )
    steps = sorted(row.steps for row in fused.leaderboard.rows)
    assert steps[0] == 7
    assert steps[-1] == 28


def steps_of(fused: FusionStrategy) -> dict[int, int]:
    return {row.number: row.steps for row in fused.leaderboard.rows}


def test_halving_waits_for_the_validation_after_its_rung() -> None:
    """Rungs after one epoch and after two, validation after the second and the fourth."""
    options = {"callbacks": [SuccessiveHalving(factor=2)], "max_epochs": 4, "check_val_every_n_epoch": 2}
    fused, _ = fit_fused([{"lr": lr} for lr in RATES], options=options)
    assert sorted(steps_of(fused).values()) == [14, 14, 14, 28]


def test_early_stopping_counts_validations() -> None:
    """The first has nothing to compare with, so patience=2 ends with the third: after six epochs, not after four."""
    callback = VariantEarlyStopping(patience=2, min_delta=100.0)
    options = {"callbacks": [callback], "max_epochs": 8, "check_val_every_n_epoch": 2}
    fused, running = fit_fused([{"lr": 0.02}, {"lr": 0.1}], options=options)
    assert set(steps_of(fused).values()) == {42}
    assert running.current_epoch == 6


@pytest.mark.parametrize("every", [1, 3])
def test_metrics_of_training_are_new_after_every_epoch(every: int) -> None:
    callback = VariantEarlyStopping("train_loss", patience=1, min_delta=100.0)
    options = {"callbacks": [callback], "max_epochs": 4, "check_val_every_n_epoch": every}
    fused, _ = fit_fused([{"lr": 0.02}, {"lr": 0.1}], options=options)
    assert set(steps_of(fused).values()) == {14}


@pytest.mark.slow
def test_each_variant_stops_for_itself_and_all_together_end_the_run() -> None:
    callback = VariantEarlyStopping(patience=0, min_delta=0.01)
    fused, running = fit_fused([{"lr": 0.02}, {"lr": 1e-9}], options={"callbacks": [callback], "max_epochs": 40})
    steps = {row.number: row.steps for row in fused.leaderboard.rows}
    assert steps[1] < steps[0]
    assert running.current_epoch < 40
    with pytest.raises(ConfigError, match=r"set Trainer\(strategy=FusionStrategy"):
        trainer(callbacks=[VariantEarlyStopping()]).fit(Classifier(), loader(), loader(shuffle=False))


@pytest.mark.parametrize("every", [1, 2])
def test_a_metric_that_no_validation_has_logged_is_refused(every: int) -> None:
    halve = SuccessiveHalving("val_los")
    missing = trainer(strategy=FusionStrategy([{}, {}]), callbacks=[halve], check_val_every_n_epoch=every)
    with pytest.raises(ConfigError, match="val_los, which the model does not log; it logs"):
        missing.fit(Classifier(), loader(), loader(shuffle=False))
    assert missing.current_epoch == every - 1


@pytest.mark.slow
@pytest.mark.parametrize("steps", [7, 14])
def test_an_array_that_has_shrunk_goes_on_from_its_checkpoint(tmp_path: Path, steps: int) -> None:
    """After one epoch and after two, at the ends of which half of the variants leave."""
    variants = [{"lr": lr, "dropout": 0.2} for lr in RATES]

    def callbacks() -> list[Any]:
        return [SuccessiveHalving(factor=2), ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)]

    whole, _ = fit_fused(variants, options={"callbacks": callbacks()[:1], "max_epochs": 3})
    fit_fused(variants, options={"callbacks": callbacks(), "max_epochs": 3, "max_steps": steps})
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(variants)
    again = trainer(strategy=resumed, callbacks=callbacks()[:1])
    again.fit(Classifier(), loader(), loader(shuffle=False), ckpt_path=tmp_path / "last.ckpt")
    for number, (left, right) in enumerate(zip(whole.variants, resumed.variants, strict=True)):
        assert difference(left, right) <= 1e-9, number
    assert str(whole.leaderboard) == str(resumed.leaderboard)
