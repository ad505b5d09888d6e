"""How much a variant takes, and arrays that turn out too wide for memory."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn

from pl_pipe.callbacks import SuccessiveHalving
from pl_pipe.errors import FusionError
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import array_width, divided_variants
from pl_pipe.strategies.fusion.array_width import evenly, widest, widest_before_training
from pl_pipe.strategies.fusion.variant_building import build_variants
from pl_pipe.strategies.fusion.variant_memory import VariantMemory, memory_of
from tests.fused_modules import Classifier, difference, fit_alone, fit_fused, loader, trainer
from tests.test_fusion_arrays import StoppedError, StopsInSecondArray

CPU = torch.device("cpu")
VARIANTS = [{"lr": 0.1}, {"lr": 0.05}, {"lr": 0.02, "dropout": 0.3}, {"lr": 0.01}, {"lr": 0.2}]


def memory_is(monkeypatch: pytest.MonkeyPatch, *, variants: float) -> None:
    """First steps find room for as many variants as are told, those included whose weights are there already."""

    def noted(module: L.LightningModule, *args: Any, **kwargs: Any) -> VariantMemory:
        found = memory_of(module, *args, **kwargs)
        there: Any = module.trainer.strategy
        free.append(round(variants * found.total_bytes / 0.8) + 1 - len(there.training.variants) * found.weights_bytes)
        return found

    free: list[int] = []
    monkeypatch.setattr(divided_variants, "memory_of", noted)
    monkeypatch.setattr(divided_variants, "free_bytes", lambda _: free[-1])


class Wide(L.LightningModule):
    """Its activations are larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1)
        self.seen: list[float] = []
        self.norm.calls = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch.mul_(2)
        self.norm.calls += 1
        loss = self.last(F.dropout(torch.relu(self.norm(self.first(batch))))).mean()
        self.seen.append(float(loss.detach()))
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]


def memory(module: Wide, optimizer: torch.optim.Optimizer, batch: Tensor) -> VariantMemory:
    return memory_of(module, optimizer, (batch, 0), {}, context=nullcontext, device=CPU)


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda weights: torch.optim.SGD(weights, lr=0.1), 0),
        (lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), 1),
        (lambda weights: torch.optim.AdamW(weights, lr=0.1), 2),
    ],
)
def test_what_a_variant_takes_is_measured_without_a_trace(make: Any, states: int) -> None:
    module, batch = Wide(), torch.randn(64, 4)
    weights = sum(4 * one.numel() for one in module.parameters())
    optimizer = make(module.parameters())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    given, random = batch.clone(), torch.get_rng_state()
    found = memory(module, optimizer, batch)
    assert found.gradients_bytes == weights
    assert weights < found.weights_bytes < weights + 9000  # two statistics and a count of batches
    assert states * weights <= found.optimizer_bytes <= states * weights + 100
    layer = 64 * 1000 * 4
    assert 3 * layer <= found.activations_bytes <= 5 * layer  # before and after norm, relu, dropout and its mask
    assert torch.equal(batch, given)
    assert torch.equal(torch.get_rng_state(), random)
    assert (module.seen, module.norm.calls, len(optimizer.state)) == ([], 0, 0)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert "log" not in vars(module)
    twice = memory(module, optimizer, torch.randn(128, 4))
    assert twice.activations_bytes > 1.9 * found.activations_bytes


def test_an_optimizer_that_cannot_be_copied_is_taken_for_a_usual_one() -> None:
    class Odd(torch.optim.SGD):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not to be copied")

    module = Wide()
    found = memory(module, Odd(module.parameters(), lr=0.1), torch.randn(8, 4))
    assert found.optimizer_bytes == 2 * found.gradients_bytes


def test_the_widest_array_leaves_a_fifth() -> None:
    each = VariantMemory(100, 100, 200, 600)
    assert widest(each, free=10_000) == 8
    assert widest(each, free=1249) == 0
    assert widest(each, free=10_000, one_by_one=True) == (8000 - 600) // 400
    assert [len(part) for part in evenly(range(8), 3)] == [3, 3, 2]
    assert [len(part) for part in evenly(range(6), 5)] == [3, 3]


def test_a_variant_that_does_not_fit_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (variant,) = build_variants(Classifier(), [{}])
    module = variant.module
    size = sum(
        one.numel() * one.element_size() for one in (*module.parameters(), *module.parameters(), *module.buffers())
    )
    monkeypatch.setattr(array_width, "free_bytes", lambda _: 10 * size)
    assert widest_before_training(variant, CPU) == 8
    monkeypatch.setattr(array_width, "free_bytes", lambda _: size - 1)
    with pytest.raises(FusionError, match="are free on cpu"):
        widest_before_training(variant, CPU)


class Hooked(Classifier):
    """What hooks do before the first step must not be done twice."""

    def on_train_start(self) -> None:
        self.epochs.append(-1)


@pytest.mark.slow
def test_arrays_that_do_not_fit_are_divided(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each variant equals its separate run all the same: weights, metrics, hooks, dropout, order of the data."""
    memory_is(monkeypatch, variants=2.5)
    stop = EarlyStopping("val_loss", patience=100)
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS)
    running = trainer(strategy=fused, callbacks=[stop])
    running.fit(Hooked(), loader(seed=3), loader(shuffle=False, seed=4))
    assert "5 variants do not fit into memory, 2 do" in caplog.text
    assert "in 3 arrays, one after another: 0, 1; 2, 3; 4" in caplog.text
    for number, variant in enumerate(VARIANTS):
        L.seed_everything(1, verbose=False)
        alone, plain = Hooked(**variant), trainer()
        plain.fit(alone, loader(seed=3), loader(shuffle=False, seed=4))
        found: Any = fused.variants[number]
        assert difference(alone, found) <= 1e-9
        assert (found.epochs, found.steps) == (alone.epochs, alone.steps)
        row = next(row for row in fused.leaderboard.rows if row.number == number)
        assert (row.steps, row.status) == (21, "trained")
        for name, value in plain.callback_metrics.items():
            assert abs(row.last[name] - float(value)) <= 1e-9, name
    (tested,) = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    assert len(tested) == 5
    assert len([line for line in caplog.messages if "do not fit" in line]) == 1


def test_what_fits_is_not_divided(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    memory_is(monkeypatch, variants=5.0)
    fused, _ = fit_fused(VARIANTS, options={"max_epochs": 1})
    assert "5 variants are trained at once: each takes about" in caplog.text
    assert fused.fusion_facts is not None
    assert fused.fusion_facts.variants == 5


@pytest.mark.slow
def test_a_divided_run_is_resumed_as_it_was_divided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory_is(monkeypatch, variants=2.0)
    whole, _ = fit_fused(VARIANTS)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    with pytest.raises(StoppedError):
        fit_fused(VARIANTS, options={"callbacks": [keeper, StopsInSecondArray(2)]})
    monkeypatch.undo()  # on a machine with more memory
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(VARIANTS)
    trainer(strategy=resumed).fit(Classifier(), loader(), loader(shuffle=False), ckpt_path=keeper.last_model_path)
    for number in range(len(VARIANTS)):
        assert difference(resumed.variants[number], whole.variants[number]) <= 1e-6, number


def test_a_resumed_run_is_divided_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its second array is what the first, as it was divided then, has left."""
    memory_is(monkeypatch, variants=2.0)
    whole, _ = fit_fused(VARIANTS)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    with pytest.raises(StoppedError):
        fit_fused(VARIANTS, options={"callbacks": [keeper, StopsInSecondArray(0)]})
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(VARIANTS)
    running = trainer(strategy=resumed)
    running.fit(Classifier(), loader(), loader(shuffle=False), ckpt_path=keeper.last_model_path)
    for number in range(len(VARIANTS)):
        assert difference(resumed.variants[number], whole.variants[number]) <= 1e-6, number
    (tested,) = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    assert len(tested) == 5


class Measured(Classifier):
    """One of its hyper-parameters is more than a plain value."""

    def __init__(self, lr: float = 0.1, loss: Any = None) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters("lr", "loss")


def test_a_trusted_checkpoint_may_hold_objects(tmp_path: Path) -> None:
    keeper, variants = ModelCheckpoint(tmp_path, save_last=True), [{"lr": 0.1}, {"lr": 0.2}]
    for path, trusted in ((None, None), (tmp_path / "last.ckpt", False)):
        L.seed_everything(1, verbose=False)
        fused = FusionStrategy(variants)
        running = trainer(strategy=fused, callbacks=[keeper], max_epochs=1 if path is None else 2)
        running.fit(Measured(loss=nn.CrossEntropyLoss()), loader(), ckpt_path=path, weights_only=trusted)
    assert running.global_step == 14
    distrusting = trainer(strategy=FusionStrategy(variants))
    with pytest.raises(pickle.UnpicklingError):
        distrusting.fit(Measured(loss=nn.CrossEntropyLoss()), loader(), ckpt_path=tmp_path / "last.ckpt")


def test_halving_goes_by_the_variants_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_is(monkeypatch, variants=3.0)
    halving = SuccessiveHalving("val_loss", factor=2)
    fused, _ = fit_fused(VARIANTS, options={"callbacks": [halving]})
    assert sorted(row.steps for row in fused.leaderboard.rows) == [7, 7, 7, 21, 21]
    assert halving.brackets[0].numbers == (3, 4)


class Scarce(Classifier):
    """Fails for want of memory, as a GPU would, while more than a few variants are there."""

    most = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy: Any = self.trainer.strategy
        if len(strategy.training.variants) > self.most:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return Classifier.training_step(self, batch, batch_idx)


class Hopeless(Scarce):
    most = 0


def test_a_want_of_memory_halves_the_array(caplog: pytest.LogCaptureFixture) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS[:4], formulation="array")
    trainer(strategy=fused).fit(Scarce(), loader(), loader(shuffle=False))
    assert "4 variants do not fit into memory, 1 do" in caplog.text
    for number, variant in enumerate(VARIANTS[:4]):
        alone, _ = fit_alone(variant)
        assert difference(alone, fused.variants[number]) <= 1e-9


def test_one_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        FusionError, match=r"not even one variant's step fits into memory: .*9 GiB; make batches smaller"
    ):
        trainer(strategy=FusionStrategy(VARIANTS[:4])).fit(Hopeless(), loader())
