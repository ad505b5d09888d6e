"""Captured and compiled steps on a GPU equal separate runs there; skipped where there is none."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_pipe.fusion.replay import Branch, captured
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import difference, loader, trainer
from tests.test_fusion_replay import DROPPING, STILL, Recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = {"accelerator": "gpu"}
DOUBLE = torch.float64


def fit(module: L.LightningModule, strategy: Any, options: Any, **kwargs: Any) -> L.Trainer:
    running = trainer(strategy=strategy, **GPU, **options) if strategy is not None else trainer(**GPU, **options)
    running.fit(module, loader(seed=5, **kwargs), loader(shuffle=False, seed=6, **kwargs))
    return running


SINGLE = 1e-4
"""How far runs in single precision may part: other kernels sum in another order."""


def check(variants: Any, formulation: str, options: Any = None, dtype: torch.dtype = DOUBLE, **settings: Any) -> Any:
    """In double precision, optimizers step as ever; in single precision their steps are captured with the rest."""
    options = {"max_epochs": 4, "precision": "64-true" if dtype == DOUBLE else "32-true", **(options or {})}
    tolerance = 1e-9 if dtype == DOUBLE else SINGLE
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation)
    running = fit(Recorded(**settings), fused, options, dtype=dtype)
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone = Recorded(**{**settings, **variant})
        plain = fit(alone, None, options, dtype=dtype)
        assert difference(alone, fused.variants[number]) <= tolerance, number
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= tolerance, name
    return fused


@pytest.mark.parametrize(
    ("formulation", "variants"),
    [
        ("branches", DROPPING), ("captured array", STILL), ("compiled branches", STILL), ("compiled array", STILL),
        ("compiled branches", DROPPING[:2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_replayed_steps_equal_separate_runs(
    formulation: str, variants: Any, optimizer: str, dtype: torch.dtype
) -> None:
    fused = check(variants, formulation, optimizer=optimizer, dtype=dtype)
    assert fused.fusion_facts.chosen["training_step"] == formulation


def test_the_quickest_is_chosen_by_itself() -> None:
    fused = check(STILL, "auto")
    assert set(fused.fusion_facts.step_s["training_step"]) >= {"branches", "captured array"}


def test_accumulation_and_clipping() -> None:
    check(DROPPING[:2], "branches", options={"accumulate_grad_batches": 3, "gradient_clip_val": 0.2})


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision(precision: str) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(STILL[:2], formulation="branches")
    options = {"precision": precision, "max_epochs": 2}
    fit(Recorded(), fused, options, dtype=torch.float32)
    L.seed_everything(1, verbose=False)
    alone = Recorded(**STILL[0])
    fit(alone, None, options, dtype=torch.float32)
    assert difference(alone, fused.variants[0]) <= 2e-2


def test_a_checkpoint_has_the_counters_of_plain_optimizers(tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(STILL[:2], formulation="branches", folder=tmp_path)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    single = {"precision": "32-true"}
    options = {"callbacks": [keeper], "max_epochs": 2, **single}
    fit(Recorded(optimizer="adamw"), fused, options, dtype=torch.float32)
    kept = torch.load(tmp_path / "variants" / "variant_0.ckpt", weights_only=False)
    steps = [state["step"] for state in kept["optimizer_states"][0]["state"].values()]
    assert all(step.device.type == "cpu" and step == 14 for step in steps)
    resumed = FusionStrategy(STILL[:2], formulation="branches")
    running = trainer(strategy=resumed, **GPU, max_epochs=4, **single)
    loaders = [loader(seed=5, dtype=torch.float32), loader(shuffle=False, seed=6, dtype=torch.float32)]
    running.fit(Recorded(optimizer="adamw"), *loaders, ckpt_path=tmp_path / "last.ckpt")
    assert running.global_step == 28


def test_branches_run_side_by_side_whichever_streams_torch_hands_out() -> None:
    """It has 32, the one that captures among them; a branch on that one would keep those after it waiting."""
    device = torch.device("cuda", torch.cuda.current_device())
    cycles = 20_000_000  # some 10 ms, of one block that leaves room for others

    def sleep() -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def took_s(count: int) -> float:
        capture = captured([Branch(sleep) for _ in range(count)], lambda: None, device, is_timed=True)
        for _ in range(2):
            capture.replay()
        torch.cuda.synchronize()
        seconds = capture.device_s()
        assert seconds is not None
        return seconds

    alone = took_s(1)
    for _ in range(12):
        assert took_s(3) < 1.5 * alone
