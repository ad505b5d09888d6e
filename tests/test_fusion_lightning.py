"""Lightning around fused variants: names of metrics, monitors, checkpoints, evaluation, hooks, results."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from pl_pipe.errors import CheckpointError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, fit_alone, fit_fused, loader, trainer

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1, "dropout": 0.3}, {"lr": 0.01, "dropout": 0.1}]


def test_names_of_metrics_and_the_best_of_all(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    options = {"logger": logger, "callbacks": [LearningRateMonitor()], "log_every_n_steps": 1}
    _, running = fit_fused(VARIANTS, options=options)
    metrics = running.callback_metrics
    assert metrics["val_loss"] == min(metrics["val_loss/variant_0"], metrics["val_loss/variant_1"])
    assert metrics["val_acc"] == max(metrics["val_acc/variant_0"], metrics["val_acc/variant_1"])
    assert set(running.progress_bar_metrics) == {"train_loss_step", "train_loss_epoch", "val_loss", "val_acc"}
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        names = set(next(csv.reader(file)))
    assert {"train_loss_step/variant_0", "train_loss_epoch/variant_1", "val_acc/variant_1", "seen/variant_0"} <= names
    assert "val_loss" not in names
    assert any("lr-SGD/variant_1" in name for name in names)


@pytest.mark.slow
def test_callbacks_monitor_a_variant_or_the_best_of_all(tmp_path: Path) -> None:
    one = ModelCheckpoint(tmp_path / "one", monitor="val_loss/variant_1", save_top_k=1)
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=1)
    stop = EarlyStopping("val_loss/variant_0", patience=0, min_delta=100.0)
    _, running = fit_fused(VARIANTS, options={"callbacks": [one, best, stop], "max_epochs": 5})
    assert running.current_epoch == 2
    assert Path(one.best_model_path).is_file()
    assert best.best_model_score == min(running.callback_metrics["val_loss"], best.best_model_score)


def test_every_variant_leaves_an_ordinary_checkpoint(tmp_path: Path) -> None:
    fused, running = fit_fused(VARIANTS, strategy={"folder": tmp_path})
    for number, variant in enumerate(VARIANTS):
        path = tmp_path / "variants" / f"variant_{number}.ckpt"
        loaded = Classifier.load_from_checkpoint(path, map_location="cpu")
        assert loaded.hparams["lr"] == variant["lr"]
        assert difference(loaded, fused.variants[number]) <= 1e-5  # loaded as fp32
        assert path.stat().st_size < 40_000  # its own weights, not the array's
        plain = trainer()
        (found,) = plain.validate(Classifier(**variant), loader(shuffle=False), ckpt_path=path, verbose=False)
        assert found["val_loss"] == pytest.approx(
            float(running.callback_metrics[f"val_loss/variant_{number}"]), abs=1e-6
        )
        goes_on = trainer(max_epochs=4)
        goes_on.fit(Classifier(**variant), loader(), ckpt_path=path)
        assert goes_on.global_step == 28


def test_results_are_a_table_a_file_and_a_picture(tmp_path: Path) -> None:
    fused, _ = fit_fused(VARIANTS, strategy={"folder": tmp_path, "monitor": "val_acc", "mode": "max"})
    with (tmp_path / "variants.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["variant"]: float(row["lr"]) for row in rows} == {"0": 0.1, "1": 0.01}
    assert [float(row["best val_acc"]) for row in rows] == sorted(
        (float(r["best val_acc"]) for r in rows), reverse=True
    )
    assert {row["steps"] for row in rows} == {"21"}
    assert float(rows[0]["last val_loss"]) > 0
    assert (tmp_path / "variants.png").stat().st_size > 5_000
    board = fused.leaderboard
    assert board.best.best == max(row.best for row in board.rows if row.best is not None)
    assert "lr=0.01" in str(board)
    assert len(board.table().rows) == 2


@pytest.mark.parametrize("formulation", ["array", pytest.param("one by one", marks=pytest.mark.slow)])
def test_a_resumed_array_equals_the_uninterrupted_one(tmp_path: Path, formulation: str) -> None:
    """With dropout and shuffled data: the random numbers go on too."""
    variants = [*VARIANTS, {"seed": 9, "dropout": 0.2}]
    strategy = {"formulation": formulation}
    whole, _ = fit_fused(variants, options={"max_epochs": 3}, strategy=strategy)
    keeper = ModelCheckpoint(tmp_path, save_last=True, every_n_epochs=1)
    fit_fused(variants, options={"max_epochs": 2, "callbacks": [keeper]}, strategy=strategy)
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(variants, **strategy)
    resumed_by = trainer(strategy=resumed)
    model = Classifier()
    torch.rand(5)  # the process stands elsewhere than it did
    resumed_by.fit(model, loader(), loader(shuffle=False), ckpt_path=tmp_path / "last.ckpt")
    assert resumed_by.global_step == 21
    for left, right in zip(whole.variants, resumed.variants, strict=True):
        assert difference(left, right) == 0
    assert resumed.leaderboard.rows[0].best == whole.leaderboard.rows[0].best


@pytest.mark.slow
def test_the_array_s_file_is_the_leading_variant_s_for_plain_lightning(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    fused, _ = fit_fused(VARIANTS, options={"callbacks": [keeper]})
    leading = fused.leaderboard.best.number
    loaded = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert difference(loaded, fused.variants[leading]) <= 1e-5
    plain = trainer(max_epochs=4)
    plain.fit(Classifier(**VARIANTS[leading]), loader(), ckpt_path=tmp_path / "last.ckpt")
    assert plain.global_step == 28
    other = trainer(strategy=FusionStrategy([{"lr": 0.5}, {"lr": 0.6}]))
    with pytest.raises(CheckpointError, match=r"dropout=0\.1"):
        other.fit(Classifier(), loader(), ckpt_path=tmp_path / "last.ckpt")
    _, alone = fit_alone({"lr": 0.1}, options={"max_epochs": 1})
    alone.save_checkpoint(tmp_path / "plain.ckpt")
    other = trainer(strategy=FusionStrategy([{"lr": 0.5}, {"lr": 0.6}]))
    with pytest.raises(CheckpointError, match="of one model"):
        other.fit(Classifier(), loader(), ckpt_path=tmp_path / "plain.ckpt")


@pytest.mark.slow
def test_evaluation_is_every_variant_s(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    _, running = fit_fused(VARIANTS, options={"callbacks": [keeper]})
    (found,) = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    (again,) = trainer(strategy=FusionStrategy(VARIANTS)).test(
        Classifier(), loader(shuffle=False), ckpt_path=tmp_path / "last.ckpt", verbose=False
    )
    predicted = running.predict(running.lightning_module, loader(shuffle=False))
    assert predicted is not None
    for number, variant in enumerate(VARIANTS):
        module, alone = fit_alone(variant)
        (expected,) = alone.test(module, loader(shuffle=False), verbose=False)
        assert found[f"test_loss/variant_{number}"] == pytest.approx(expected["test_loss"], abs=1e-12)
        assert again[f"test_loss/variant_{number}"] == pytest.approx(expected["test_loss"], abs=1e-12)
        labels = alone.predict(module, loader(shuffle=False))
        assert all(torch.equal(p[f"variant_{number}"], q) for p, q in zip(predicted, labels, strict=True))


def test_hooks_of_all_variants_are_called() -> None:
    class Hooked(Classifier):
        calls: list[tuple[str, float]] = []  # noqa: RUF012

        def note(self, hook: str) -> None:
            self.calls.append((hook, self.hparams["lr"]))

        def setup(self, stage: str) -> None:
            self.note("setup")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.note("batch end")
            assert outputs["loss"].shape == ()
            self.log("last_loss", outputs["loss"])

        def on_after_backward(self) -> None:
            self.note("gradients" if all(p.grad is not None for p in self.parameters()) else "no gradients")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in self.parameters()}
            self.note(f"lr {self.optimizers().param_groups[0]['lr']}")

        def on_fit_end(self) -> None:
            self.note("fit end")

    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}])
    running = trainer(strategy=fused, max_steps=1, max_epochs=None)
    running.fit(Hooked(), loader(), loader(shuffle=False))
    for hook in ("setup", "batch end", "gradients", "fit end"):
        assert [lr for name, lr in Hooked.calls if name == hook] == [0.1, 0.2], hook
    assert [name for name, _ in Hooked.calls if name.startswith("lr")] == ["lr 0.1", "lr 0.2"]
    assert float(running.callback_metrics["last_loss/variant_1"]) > 0


def test_modules_are_ordinary_after_a_fit() -> None:
    fused, _ = fit_fused(VARIANTS)
    module = fused.variants[1]
    assert not [
        name for name in ("log", "optimizers", "on_train_epoch_end", "on_validation_model_eval") if name in vars(module)
    ]
    assert module.network.layers[0].weight.untyped_storage().nbytes() == 8 * 12 * 8
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer(max_epochs=1).fit(module, loader())
    assert any(not torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(name.endswith("variant_1") for name in trainer().callback_metrics)


def test_a_plateau_scheduler_watches_its_own_variant() -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    rates = {}
    for lr in (0.5, 1e-6):
        L.seed_everything(1, verbose=False)
        alone = trainer()
        alone.fit(Plateau(lr=lr), loader(), loader(shuffle=False))
        rates[lr] = alone.optimizers[0].param_groups[0]["lr"]
    L.seed_everything(1, verbose=False)
    running = trainer(strategy=FusionStrategy([{"lr": 0.5}, {"lr": 1e-6}]))
    running.fit(Plateau(), loader(), loader(shuffle=False))
    found = [group["lr"] for group in running.optimizers[0].param_groups]
    assert found == list(rates.values())
    assert found[1] == pytest.approx(0.25e-6)


def test_the_trainer_saves_the_array_after_a_fit_too(tmp_path: Path) -> None:
    """As `trainer.save_checkpoint` does for a plain model: the file goes on where the fit ended."""
    half, running = fit_fused(VARIANTS, options={"max_epochs": 2})
    running.save_checkpoint(tmp_path / "after.ckpt")
    whole, _ = fit_fused(VARIANTS)
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(VARIANTS)
    again = trainer(strategy=resumed)
    again.fit(Classifier(), loader(), loader(shuffle=False), ckpt_path=tmp_path / "after.ckpt")
    for left, right in zip(whole.variants, resumed.variants, strict=True):
        assert difference(left, right) <= 1e-9
    assert difference(half.variants[0], whole.variants[0]) > 1e-6


class Silent(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.criterion(self(batch[0]), batch[1])

    def on_train_epoch_end(self) -> None: ...


def test_a_leaderboard_without_its_metric_says_so(caplog: pytest.LogCaptureFixture) -> None:
    fused, _ = fit_fused(VARIANTS, strategy={"monitor": "val_f1"}, options={"max_epochs": 1})
    assert "monitor=val_f1 is not logged" in caplog.text
    assert "val_acc, val_loss" in caplog.text
    assert fused.leaderboard.best.number == 0
    silent = FusionStrategy(VARIANTS)
    trainer(strategy=silent, max_epochs=1).fit(Silent(), loader())
    assert {(row.status, row.steps) for row in silent.leaderboard.rows} == {("trained", 7)}
