"""A second fit of the same trainer goes on as separate runs would, whatever arrays the variants are trained in."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, loader, trainer

TOGETHER: list[dict[str, Any]] = [{"lr": 0.1, "dropout": 0.3}, {"lr": 0.03, "dropout": 0.5}]
SEEDED: list[dict[str, Any]] = [{"dropout": 0.3}, {"dropout": 0.3, "seed": 3}]
APART: list[dict[str, Any]] = [{"dropout": 0.3}, {"dropout": 0.3, "width": 5}, {"dropout": 0.1, "width": 3}]


def fit_twice(model: Any, strategy: Any, epochs: tuple[int, int], **options: Any) -> L.Trainer:
    running = trainer(max_epochs=epochs[0], **options, **({} if strategy is None else {"strategy": strategy}))
    running.fit(model, loader(seed=5), loader(shuffle=False, seed=6))
    running.fit_loop.max_epochs = epochs[1]
    running.fit(model, loader(seed=7), loader(shuffle=False, seed=6))
    return running


@pytest.mark.parametrize("epochs", [(1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("variants", "max_array"), [(TOGETHER, "auto"), (TOGETHER, 1), (SEEDED, "auto"), (SEEDED, 1), (APART, "auto")]
)
def test_a_second_fit_goes_on_as_separate_runs_do(variants: Any, max_array: Any, epochs: tuple[int, int]) -> None:
    """With masks that nobody has drawn before."""
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, max_array=max_array)
    fit_twice(Classifier(**variants[0]), fused, epochs)
    for number, variant in enumerate(variants):
        own = dict(variant)
        L.seed_everything(own.pop("seed", 1), verbose=False)
        alone = Classifier(**own)
        plain = fit_twice(alone, None, epochs)
        assert fused.variants[number].steps == alone.steps
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        (row,) = [row for row in fused.leaderboard.rows if row.number == number]
        assert row.steps == plain.global_step


class Leaving(L.Callback):
    def on_train_epoch_end(self, running: L.Trainer, module: L.LightningModule) -> None:
        if running.current_epoch == 0:
            running.strategy.stop_variants([1])  # type: ignore[attr-defined]


def test_a_variant_that_has_left_draws_nothing_twice_in_another_fit() -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(SEEDED)
    fit_twice(Classifier(**SEEDED[0]), fused, (2, 3), callbacks=[Leaving()])
    L.seed_everything(3, verbose=False)
    alone = Classifier(dropout=0.3)
    fit_twice(alone, None, (1, 2))
    assert fused.variants[1].steps == alone.steps
    assert difference(alone, fused.variants[1]) <= 1e-9


def test_each_array_meets_callbacks_as_it_left_them() -> None:
    """The first array stops early, and in a second fit at once; the other goes on."""
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"lr": 0.0}, {"lr": 0.1}], max_array=1)
    stop = EarlyStopping("train_loss_epoch", patience=1, min_delta=1e-6, check_on_train_epoch_end=True)
    running = trainer(strategy=fused, max_epochs=4, callbacks=[stop])
    batches = loader(shuffle=False)
    model = Plain()
    running.fit(model, batches)
    first = [variant.steps for variant in fused.variants]
    assert first == [2 * len(batches), 4 * len(batches)]
    running.fit_loop.max_epochs = 6
    running.should_stop = False
    running.fit(model, batches)
    assert [variant.steps for variant in fused.variants] == [3 * len(batches), 6 * len(batches)]


class Plain(Classifier):
    """Without batch norm, whose statistics would change what is logged."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr, gamma=1.0)
        self.save_hyperparameters({"lr": lr})
        self.network = self.network.layers[0]  # type: ignore[index, union-attr]
        self.extra = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        loss = self(x).square().mean()
        self.steps += 1
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


def test_the_last_checkpoint_is_that_of_the_last_array(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first array has been trained when it is made, and is not trained further: which is told."""
    fused = FusionStrategy(TOGETHER, max_array=1)
    keeper = ModelCheckpoint(tmp_path, save_last=True, filename="{epoch}-{step}-kept")
    trainer(strategy=fused, max_epochs=1, callbacks=[keeper]).fit(Classifier(), loader())
    assert sorted(path.name for path in tmp_path.glob("last*")) == ["last.ckpt"]
    again = FusionStrategy(TOGETHER, max_array=1)
    running = trainer(strategy=again, max_epochs=2)
    running.fit(Classifier(), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert [variant.steps for variant in again.variants] == [0, 7]
    assert "variants trained before the checkpoint (0) stay as they are" in caplog.text
