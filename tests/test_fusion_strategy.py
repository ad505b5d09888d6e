"""Variants trained together equal the separate Lightning runs, whichever way their steps are computed."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, fit_alone, fit_fused, loader, trainer

VARIANTS: list[dict[str, Any]] = [
    {"lr": 0.1, "dropout": 0.2},
    {"lr": 0.03, "weight_decay": 0.05, "smoothing": 0.1, "dropout": 0.5, "gamma": 0.5},
    {"lr": 0.3, "dropout": 0.1, "smoothing": 0.2},
]


def check_equal(fused: Any, running: Any, variants: list[dict[str, Any]], **settings: Any) -> None:
    """Parameters, buffers, metrics and counters of 21 steps, three of them with a smaller batch."""
    assert len(fused.variants) == len(variants)
    for number, variant in enumerate(variants):
        alone, plain = fit_alone(variant, **settings)
        assert difference(alone, fused.variants[number]) <= 1e-9
        assert fused.variants[number].steps == alone.steps == 21
        assert fused.variants[number].epochs == alone.epochs
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


@pytest.mark.parametrize("formulation", ["array", "model array", "one by one", "auto"])
def test_variants_equal_separate_runs(formulation: str) -> None:
    fused, running = fit_fused(VARIANTS, strategy={"formulation": formulation})
    check_equal(fused, running, VARIANTS)
    assert difference(fused.variants[0], fused.variants[1]) > 1e-3


@pytest.mark.parametrize(
    "kind", ["resnet", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lstm", "transformer"))]
)
def test_networks_of_other_kinds(kind: str) -> None:
    variants = VARIANTS[:2]
    fused, running = fit_fused(variants, kind=kind, optimizer="adamw", strategy={"formulation": "array"}, seed=4)
    check_equal(fused, running, variants, kind=kind, optimizer="adamw", seed=4)


def test_a_step_that_reads_what_differs_runs_in_lockstep(caplog: pytest.LogCaptureFixture) -> None:
    fused, running = fit_fused(VARIANTS, reads=True)
    check_equal(fused, running, VARIANTS, reads=True)
    assert "not computed as array, but model array" in caplog.text
    assert "fused_modules.py" in caplog.text
    assert "'smoothing'" in caplog.text


def test_initial_weights_are_those_of_separate_runs() -> None:
    variants = [{"seed": 5}, {"seed": 6}, {"lr": 0.2}]
    fused, _ = fit_fused(variants, seed=7, options={"max_steps": 0, "max_epochs": None})
    for module, seed in zip(fused.variants, (5, 6, 7), strict=True):
        L.seed_everything(seed, verbose=False)
        assert difference(module, Classifier().double()) == 0


@pytest.mark.slow
def test_variants_that_draw_otherwise_share_a_loader_with_its_own_generator() -> None:
    """One without dropout, and one with a seed of its own: none depends on what the others draw."""
    variants = [{"dropout": 0.3}, {"lr": 0.03}, {"dropout": 0.3, "seed": 8}, {"dropout": 0.5}]
    for formulation in ("array", "one by one"):
        L.seed_everything(1, verbose=False)
        fused = FusionStrategy(variants, formulation=formulation)
        trainer(strategy=fused).fit(Classifier(), loader(seed=5), loader(shuffle=False, seed=6))
        for number, variant in enumerate(variants):
            settings = dict(variant)
            L.seed_everything(int(settings.pop("seed", 1)), verbose=False)
            alone = Classifier(**settings)
            trainer().fit(alone, loader(seed=5), loader(shuffle=False, seed=6))
            assert difference(alone, fused.variants[number]) <= 1e-9, number


@pytest.mark.slow
def test_clipping_accumulation_and_validation_within_epochs() -> None:
    options = {
        "gradient_clip_val": 0.2,
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "check_val_every_n_epoch": None,
    }
    fused, running = fit_fused(VARIANTS, options=options, strategy={"formulation": "array"})
    check_equal(fused, running, VARIANTS, options=options)
    unclipped, _ = fit_fused(VARIANTS, options={**options, "gradient_clip_val": None})
    assert difference(unclipped.variants[0], fused.variants[0]) > 1e-3


@pytest.mark.parametrize("formulation", ["array", "model array", "one by one"])
def test_a_diverging_variant_leaves_the_others_alone(formulation: str, caplog: pytest.LogCaptureFixture) -> None:
    variants = [{"lr": 0.1}, {"lr": 1e200}, {"lr": 0.03}]
    fused, _ = fit_fused(variants, strategy={"formulation": formulation})
    assert not all(torch.isfinite(value).all() for value in fused.variants[1].state_dict().values())
    for number in (0, 2):
        alone, _ = fit_alone(variants[number])
        assert difference(alone, fused.variants[number]) <= 1e-9
    assert [(row.number, row.status) for row in fused.leaderboard.rows] == [
        (0, "trained"),
        (2, "trained"),
        (1, "diverged"),
    ]
    assert "of variants 1 not all weights are finite numbers" in caplog.text


@pytest.mark.parametrize("given", [None, [{}]])
def test_one_variant_is_the_plain_run(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    fused, running = fit_fused(given)
    check_equal(fused, running, [{}])
    assert ("no variants are given" in caplog.text) == (given is None)


@pytest.mark.parametrize("formulation", ["array", "one by one"])
def test_half_precision_scales_each_variant_for_itself(formulation: str) -> None:
    """One variant's overflow lowers its own scale; the other's steps and scale are those of a separate run."""
    variants = [{"lr": 0.1}, {"lr": 0.1, "factor": 1e38}]
    seen: list[list[float]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append([scaler.get_scale() for scaler in trainer.strategy.composite.scalers])

    def half() -> MixedPrecision:
        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4))

    options = {"max_epochs": 2, "gradient_clip_val": 0.5}
    fused, _ = fit_fused(
        variants,
        options={**options, "plugins": [half()], "callbacks": [Watch()]},
        strategy={"formulation": formulation},
        dtype=torch.float32,
    )
    alone, plain = fit_alone(variants[0], options={**options, "plugins": [half()]}, dtype=torch.float32)
    assert difference(alone, fused.variants[0]) <= (0 if formulation == "one by one" else 1e-2)
    assert seen[-1][0] == plain.precision_plugin.scaler.get_scale() > 1024
    assert seen[-1][1] < 1
    untrained = fused.variants[1].parameters()
    L.seed_everything(1, verbose=False)
    assert all(torch.equal(*pair) for pair in zip(untrained, Classifier().parameters(), strict=True))


def test_bf16_is_that_of_a_separate_run_up_to_rounding() -> None:
    options = {"precision": "bf16-mixed", "max_epochs": 1}
    variants = [{"lr": 0.1}, {"lr": 0.03}]
    fused, _ = fit_fused(variants, options=options, strategy={"formulation": "array"}, dtype=torch.float32)
    alone, _ = fit_alone(variants[1], options=options, dtype=torch.float32)
    assert {value.dtype for value in fused.variants[1].parameters()} == {torch.float32}
    assert difference(alone, fused.variants[1]) <= 2e-2


class _WritesThenReads(Classifier):
    """Changes the batch, and draws from Python and NumPy, before it turns out that the step cannot be an array."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x.mul_(2.0)
        x.add_(random.random() + np.random.rand())
        loss = self.criterion(self(x), y)
        return loss if loss.item() < 1e9 else None


def test_a_way_that_fails_leaves_batch_and_random_numbers_as_they_were() -> None:
    """Whoever takes the step over sees what the first one saw."""
    variants = [{"lr": 0.1}, {"lr": 0.03}]
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants)
    trainer(strategy=fused, max_epochs=1).fit(_WritesThenReads(), loader())
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone = _WritesThenReads(**variant)
        trainer(max_epochs=1).fit(alone, loader())
        assert difference(alone, fused.variants[number]) <= 1e-9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr,lr\n0.1,0.2\n", "two columns 'lr'"),
        ('lr,h\n0.1,"1\n0.2,1', "is no CSV"),
        ("lr,dropout\n0.1\n", "1 values in line 2 for 2 names; give one a name"),
    ],
)
def test_trials_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trials.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        FusionStrategy(trials=file)


def test_trials_of_a_spreadsheet(tmp_path: Path) -> None:
    file = tmp_path / "trials.csv"
    file.write_text("lr\n0.1\n", encoding="utf-8-sig")
    assert FusionStrategy(trials=file).choices == [{"lr": 0.1}]


def test_an_empty_list_of_variants_is_refused() -> None:
    with pytest.raises(ConfigError, match="variants is an empty list"):
        FusionStrategy([])


@pytest.mark.parametrize(("size", "words"), [(0, "choose 1 or more"), ("abc", "whole number"), (32.5, "whole number")])
def test_sizes_of_batches_that_are_none_are_refused_before_training(size: Any, words: str) -> None:
    fused = FusionStrategy([{"batch_size": 4}, {"batch_size": size}])
    with pytest.raises(ConfigError, match=f"variant 1 has batch_size={size!r}; .*{words}"):
        trainer(strategy=fused).fit(Classifier(), loader())
