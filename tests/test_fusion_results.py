"""What a fit of variants leaves behind when not all goes well, and under which names learning rates are."""

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import CheckpointError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, loader, trainer
from tests.test_fusion_replay import Recorded


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


class Activated(L.LightningModule):
    def __init__(self, lr: float = 0.1, act: Any = torch.relu, groups: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer, self.out, self.act = nn.Linear(4, 3), nn.Linear(3, 1), act

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.out(self.act(self.layer(batch[0]))).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        parts = [list(self.parameters())] if self.hparams["groups"] == 1 else [[one] for one in self.parameters()]
        return torch.optim.SGD([{"params": part} for part in parts], lr=self.hparams["lr"])


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(12, 4)), 2)


def test_a_hyper_parameter_that_cannot_be_pickled_is_left_out_of_checkpoints(tmp_path: Path) -> None:
    """As plain Lightning does, with a warning."""
    variants = [{"lr": 0.1}, {"act": lambda x: x * torch.sigmoid(x)}, {"lr": 0.3}]
    fused = FusionStrategy(variants, folder=tmp_path)
    keeper = ModelCheckpoint(tmp_path / "kept")
    running = trainer(strategy=fused, max_epochs=2, precision="32-true", callbacks=[keeper])
    with pytest.warns(UserWarning, match="'act' removed from hparams"):
        running.fit(Activated(), batches())
    kept = [torch.load(tmp_path / "variants" / f"variant_{k}.ckpt", weights_only=False) for k in range(3)]
    assert [set(one["hyper_parameters"]) for one in kept] == [
        {"lr", "act", "groups"},
        {"lr", "groups"},
        {"lr", "act", "groups"},
    ]
    assert len(read(tmp_path / "variants.csv")) == 3


class Unlucky(Activated):
    error: BaseException | None = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 8 and self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("no more"), KeyboardInterrupt()], ids=["error", "keyboard"])
def test_a_table_is_left_by_a_training_that_does_not_end(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unlucky, "error", error)
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}], folder=tmp_path)
    running = trainer(strategy=fused, max_epochs=3, precision="32-true", log_every_n_steps=1)
    model = Unlucky()
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        running.fit(model, batches())
    rows = read(tmp_path / "variants.csv")
    assert [(row["steps"], row["status"]) for row in rows] == [("8", "interrupted")] * 2
    assert all(float(row["last train_loss"]) > 0 for row in rows)
    assert (tmp_path / "variants.png").is_file()
    monkeypatch.setattr(Unlucky, "error", None)
    running.fit(model, batches())
    assert [row["status"] for row in read(tmp_path / "variants.csv")] == ["trained"] * 2


def test_an_error_of_the_first_step_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "variants.csv").write_text("of a run before")
    fused = FusionStrategy([{"lr": 0.1}, {"act": None}], folder=tmp_path)
    with pytest.raises(TypeError, match="not callable"):
        trainer(strategy=fused, precision="32-true").fit(Activated(), batches())
    assert (tmp_path / "variants.csv").read_text() == "of a run before"


class Leaving(L.Callback):
    def on_train_epoch_end(self, running: L.Trainer, module: L.LightningModule) -> None:
        if running.current_epoch == 0:
            running.strategy.stop_variants([0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("groups", [1, 4])
def test_learning_rates_have_their_variants_names_whoever_leaves(groups: int, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}])
    options = {"logger": logger, "callbacks": [LearningRateMonitor("epoch"), Leaving()], "precision": "32-true"}
    trainer(strategy=fused, max_epochs=3, **options).fit(Activated(groups=groups), batches())
    rows = read(Path(logger.log_dir) / "metrics.csv")
    found = {name: [row[name] for row in rows if row[name]] for name in rows[0] if name.startswith("lr-")}
    suffixes = [""] if groups == 1 else [f"/pg{group + 1}" for group in range(groups)]
    assert found == {
        f"lr-SGD/variant_{variant}{suffix}": [str(lr)] * epochs
        for variant, lr, epochs in ((0, 0.1, 1), (1, 0.2, 3), (2, 0.3, 3))
        for suffix in suffixes
    }


def test_rates_that_schedulers_tell_are_not_told_twice(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}])
    options = {"logger": logger, "callbacks": [LearningRateMonitor("step")], "log_every_n_steps": 1}
    trainer(strategy=fused, max_epochs=1, **options).fit(Classifier(), loader())
    names = {name for name in read(Path(logger.log_dir) / "metrics.csv")[0] if name.startswith("lr-")}
    assert names == {"lr-SGD/variant_0", "lr-SGD/variant_1"}


def test_one_variants_checkpoint_is_no_arrays_to_evaluate(tmp_path: Path) -> None:
    variants = [{"lr": 0.1}, {"lr": 0.2}]
    fused = FusionStrategy(variants, folder=tmp_path)
    trainer(strategy=fused, max_epochs=1).fit(Classifier(), loader())
    again = trainer(strategy=FusionStrategy(variants))
    with pytest.raises(CheckpointError, match=r"2 variants to evaluate.*strategy=single"):
        again.validate(Classifier(), loader(), ckpt_path=tmp_path / "variants" / "variant_1.ckpt", verbose=False)


def test_metrics_are_not_said_to_be_left_out_by_the_user() -> None:
    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}], formulation="array")
    trainer(strategy=fused, max_epochs=1).fit(Recorded(), loader())
    assert fused.fusion_facts is not None
    told = "\n".join(fused.fusion_facts.lines)
    assert "a metric" in told
    assert "fuse_except" not in told
