"""Captured and compiled steps on a GPU equal separate runs there; skipped where there is none."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_pipe.fusion.replay import Branch, captured
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import choosing_threads, replayed_steps
from pl_pipe.strategies.fusion.late_numbers import LateNumbers
from tests.fused_modules import difference, loader, trainer
from tests.test_fusion_replay import DROPPING, STILL, Recorded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = {"accelerator": "gpu"}
DOUBLE = torch.float64


def fit(module: L.LightningModule, strategy: Any, options: Any, **kwargs: Any) -> L.Trainer:
    running = trainer(strategy=strategy, **GPU, **options) if strategy is not None else trainer(**GPU, **options)
    running.fit(module, loader(seed=5, **kwargs), loader(shuffle=False, seed=6, **kwargs))
    return running


SINGLE = 5e-4
"""How far runs in single precision may part: other kernels sum in another order. 1.2e-4 was seen."""
GENTLY = [{**variant, "lr": variant["lr"] / 10} for variant in DROPPING[:2]]
"""With the whole rates, 28 steps of attention make 1e-3 of a difference of 3e-7 in the first weights."""


def check(variants: Any, formulation: str, options: Any = None, dtype: torch.dtype = DOUBLE, **settings: Any) -> Any:
    """In double precision, optimizers step as ever; in single precision their steps are captured with the rest."""
    options = {"max_epochs": 4, "precision": "64-true" if dtype == DOUBLE else "32-true", **(options or {})}
    tolerance = 1e-9 if dtype == DOUBLE else SINGLE
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation)
    kind = settings.get("kind", "perceptron")
    running = fit(Recorded(**settings), fused, options, dtype=dtype, kind=kind)
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone = Recorded(**{**settings, **variant})
        plain = fit(alone, None, options, dtype=dtype, kind=kind)
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


@pytest.mark.parametrize(("formulation", "variants"), [("compiled branches", DROPPING[:2]), ("compiled array", STILL)])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_captures_of_a_thread_with_choices_of_its_own(
    formulation: str, variants: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thread is taken for the quickest; masks, statistics and weights are as if nobody had tried."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    tried: list[float] = []
    made_in: list[str] = []

    def replay_s(*args: Any) -> float:
        tried.append(plain(*args))
        return -float(len(tried))

    def noted(*args: Any, **kwargs: Any) -> Any:
        made_in.append(threading.current_thread().name)
        return captured(*args, **kwargs)

    plain = choosing_threads._replay_s
    monkeypatch.setattr(choosing_threads, "_replay_s", replay_s)
    monkeypatch.setattr(replayed_steps, "captured", noted)
    check(variants, formulation, dtype=dtype, kind="resnet")
    assert len(tried) == 1 + choosing_threads._THREADS
    assert min(tried) > 0
    later = made_in[len(tried) :]
    assert len(later) == (1 if dtype == DOUBLE else 2)  # then with the optimizers' steps, too
    assert all(name.startswith("pl_pipe-cudnn") for name in later)


@pytest.mark.parametrize("kind", ["resnet", "dropping", "attending"])
def test_masks_do_not_depend_on_layouts_that_the_compiler_picks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pads matrices where that was quicker when it was tried, and prefers channels last."""
    from torch._inductor import config

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    with config.patch(force_shape_pad=True, force_layout_optimization=True):
        check(GENTLY if kind == "attending" else DROPPING[:2], "compiled branches", dtype=torch.float32, kind=kind)


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


class _Batches:
    """That lie on the GPU; a list would be taken for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _NobodyWaits(L.Callback):
    """From a batch on, and until one has been trained on, to wait for the GPU is an error."""

    def __init__(self, begin: int, end: int) -> None:
        self._begin, self._end = begin, end
        self.steps = 0

    def on_train_batch_start(self, running: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._begin:
            torch.cuda.set_sync_debug_mode("error")
        self.steps += batch_idx >= self._begin

    def on_train_batch_end(self, running: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._end:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("has_bar", [False, True])
def test_no_step_waits_for_the_gpu_though_metrics_are_noted_and_shown(has_bar: bool) -> None:
    """Curves have a point every second step here, and a progress bar is told a loss at every one."""
    found = [[part.cuda() for part in batch] for batch in loader(seed=5, dtype=torch.float32)]
    batches = _Batches([batch for batch in found if len(batch[0]) == len(found[0][0])] * 8)
    watch = _NobodyWaits(len(batches) // 2, len(batches) - 1)
    fused = FusionStrategy(STILL, formulation="branches")
    options = {"max_epochs": 1, "precision": "32-true", "log_every_n_steps": 2, "callbacks": [watch]}
    options["enable_progress_bar"] = has_bar
    try:
        running = trainer(strategy=fused, **GPU, **options)
        running.fit(Recorded(), batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watch.steps == len(batches) - len(batches) // 2
    curves = [fused.records.curves[number]["train_loss_step"] for number in range(len(STILL))]
    assert [step for step, _ in curves[0]] == list(range(2, len(batches) + 1, 2))
    shown = running.progress_bar_metrics["train_loss_step"]
    assert shown == min(float(running.callback_metrics[f"train_loss_step/variant_{k}"]) for k in range(len(STILL)))


def test_late_numbers_are_those_of_their_time() -> None:
    numbers = torch.arange(4.0, device="cuda")
    given = [numbers[1], 0.5, numbers[3], torch.tensor(7), torch.tensor(2**40, device="cuda")]
    LateNumbers(given).read()  # kernels and memory of the host that copies need are there now
    torch.cuda._sleep(400_000_000)  # type: ignore[no-untyped-call]
    late = LateNumbers(given)
    assert not late.have_arrived
    numbers.zero_()
    assert late.read() == [1.0, 0.5, 3.0, 7.0, 2**40]
