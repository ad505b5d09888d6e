"""The callbacks, in a plain Trainer and without the command line."""

import csv
import math
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from pl_pipe.callbacks.best_checkpoint import BestCheckpoint
from pl_pipe.callbacks.last_checkpoint import LastCheckpoint
from pl_pipe.callbacks.predictions import PredictionWriter, csv_rows, join_batches
from pl_pipe.callbacks.run_summary import RunSummary
from pl_pipe.errors import ConfigError


class Pair(NamedTuple):
    total: torch.Tensor
    note: str


class Model(BoringModel):
    """Logs a prepared validation value each epoch, under a chosen name."""

    def __init__(self, values: list[float], name: str = "val_loss") -> None:
        super().__init__()
        self.values, self.name = values, name

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log(self.name, self.values[self.current_epoch])

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(32, 10), batch_size=4)  # 4, 4 and a smaller last batch of 2

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"sum": batch.sum(dim=1), "twice": batch[:, :2] * 2}


def fit(model: L.LightningModule, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults = {"max_epochs": len(getattr(model, "values", [0])), "limit_val_batches": 1, "num_sanity_val_steps": 1}
    trainer = L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        callbacks=list(callbacks), **(defaults | settings),
    )  # fmt: skip
    trainer.fit(model)
    return trainer


@pytest.mark.parametrize(("mode", "best", "epoch"), [("min", 1.0, 1), ("max", 3.0, 0)])
def test_summary_counts_and_remembers_the_best(mode: str, best: float, epoch: int) -> None:
    summary = RunSummary("val_loss", mode)
    fit(Model([3.0, 1.0, 2.0]), summary)
    record = summary.record
    assert (record.epochs, record.steps, record.samples) == (3, 9, 30)
    assert record.samples_per_s == pytest.approx(30 / record.train_s)
    assert record.best is not None
    assert (record.best.value, record.best.epoch, record.best.step) == (best, epoch, 3 * (epoch + 1))
    assert record.last["val_loss"] == 2.0


def test_summary_of_batches_that_do_not_tell_their_size() -> None:
    class Opaque(Model):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(RandomDataset(32, 8), batch_size=4, collate_fn=lambda rows: object())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(torch.ones(2, 32)).sum()

    summary = RunSummary()
    fit(Opaque([1.0]), summary)
    assert (summary.record.samples, summary.record.samples_per_s, summary.record.own_steps) == (None, None, 2)


def test_without_a_monitor_the_mode_is_that_of_val_loss() -> None:
    summary = RunSummary(None, "max")
    fit(Model([3.0, 1.0, 2.0]), summary)
    assert summary.record.best is not None
    assert summary.record.best.value == 1.0
    with pytest.raises(ConfigError, match="monitor_mode=up is unknown; choose min or max"):
        RunSummary("x", "up")


def test_summary_ignores_nan_and_knows_when_there_is_no_best() -> None:
    summary = RunSummary("val_loss", "min")
    fit(Model([math.nan, 5.0, math.nan]), summary)
    assert summary.record.best is not None
    assert summary.record.best.value == 5.0
    other = RunSummary("never_logged", "min")
    fit(Model([1.0]), other)
    assert other.record.best is None


def test_summary_reads_no_metrics_when_a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing a metric is a collective: the failing rank would wait for ranks that never come."""

    class Failing(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 4:
                monkeypatch.setattr(L.Trainer, "callback_metrics", property(lambda trainer: 1 / 0))
                raise RuntimeError("out of luck")
            return super().training_step(batch, batch_idx)

    summary = RunSummary()
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(Failing([3.0, 1.0]), summary)
    assert (summary.record.steps, summary.record.last, summary.record.samples_per_s > 0) == (4, {"val_loss": 3.0}, True)


def test_summary_does_not_count_validation_as_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("pl_pipe.callbacks.run_summary.time.perf_counter", lambda: now[0])

    class Clocked(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 1.0
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            now[0] += 100.0
            super().validation_step(batch, batch_idx)

    summary = RunSummary()
    fit(Clocked([1.0, 2.0]), summary)
    assert summary.record.train_s == pytest.approx(6.0)
    assert summary.record.samples_per_s == pytest.approx(20 / 6)


@pytest.mark.parametrize(("mode", "step"), [("min", 6), ("max", 3)])
def test_best_checkpoint_is_one_file(tmp_path: Path, mode: str, step: int) -> None:
    fit(Model([3.0, 1.0, 2.0]), BestCheckpoint(str(tmp_path), "val_loss", mode))
    assert [file.name for file in tmp_path.iterdir()] == ["best.ckpt"]
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == step


def test_best_by_the_usual_name_or_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(Model([3.0, 1.0]), BestCheckpoint(str(tmp_path / "usual")))
    assert (tmp_path / "usual" / "best.ckpt").is_file()
    fit(Model([3.0, 1.0], name="mine"), BestCheckpoint(str(tmp_path / "other")))
    assert not (tmp_path / "other" / "best.ckpt").exists()
    warnings = [record.message for record in caplog.records if "no best.ckpt" in record.message]
    assert len(warnings) == 1
    assert "it logs mine; set monitor=<one of them>" in warnings[0]


def test_a_monitor_that_was_asked_for_must_be_logged(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"monitor=val_acc, which the model does not log; it logs val_loss; set"):
        fit(Model([1.0]), BestCheckpoint(str(tmp_path), "val_acc", "max"))


def test_best_needs_no_validation_to_be_run(tmp_path: Path) -> None:
    fit(Model([1.0]), BestCheckpoint(str(tmp_path), "val_acc", "max"), limit_val_batches=0)
    assert not list(tmp_path.iterdir())


def saved_steps(monkeypatch: pytest.MonkeyPatch, callback: LastCheckpoint, epochs: int = 2) -> list[int]:
    steps: list[int] = []
    save = L.Trainer.save_checkpoint

    def note(trainer: L.Trainer, *arguments: Any, **options: Any) -> None:
        steps.append(trainer.global_step)
        save(trainer, *arguments, **options)

    monkeypatch.setattr(L.Trainer, "save_checkpoint", note)
    fit(Model([0.0] * epochs), callback)
    return steps


def test_last_checkpoint_by_steps_and_at_epoch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = saved_steps(monkeypatch, LastCheckpoint(str(tmp_path), every_n_steps=2))
    assert steps == [2, 3, 4, 6, 6]  # an epoch has 3 steps; its end is saved even where step 6 is saved already
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_last_checkpoint_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched until step 5; at an interval of 4 steps, saved at 9 and 13, and at the epochs' ends."""
    callback = LastCheckpoint(str(tmp_path), every_s=35.0)
    monkeypatch.setattr(callback, "_agreed_interval", lambda trainer: 4)
    steps = saved_steps(monkeypatch, callback, epochs=5)
    assert steps == [3, 6, 9, 9, 12, 13, 15]


def test_pace_turns_seconds_into_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr("pl_pipe.callbacks.last_checkpoint.time.monotonic", lambda: now[0])
    asked = []

    class Slow(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now[0] += 10.0
            return super().training_step(batch, batch_idx)

    class Watched(LastCheckpoint):
        def _agreed_interval(self, trainer: L.Trainer) -> int:
            asked.append(super()._agreed_interval(trainer))
            return asked[-1]

    fit(Slow([0.0] * 5), Watched(str(tmp_path), every_s=42.0))
    assert asked == [4, 4, 4]  # at steps 5, 9 and 13 of 15


@pytest.mark.parametrize("settings", [{"every_s": 0.0}, {"every_n_steps": 0}])
def test_intervals_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"callbacks.last.every_"):
        LastCheckpoint("x", **settings)


@pytest.mark.parametrize("kind", ["pt", "csv"])
def test_predictions_are_written_in_order(tmp_path: Path, kind: str) -> None:
    model = Model([0.0])
    writer = PredictionWriter(tmp_path, kind)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[writer])
    data = RandomDataset(32, 10)
    trainer.predict(model, DataLoader(data, batch_size=4), return_predictions=False)
    assert [file.name for file in tmp_path.iterdir()] == [f"predictions.{kind}"]
    sums = data.data.sum(dim=1)
    if kind == "pt":
        content = torch.load(tmp_path / "predictions.pt", weights_only=True)
        assert torch.equal(content["index"], torch.arange(10))
        torch.testing.assert_close(content["outputs"]["sum"], sums)
        assert content["outputs"]["twice"].shape == (10, 2)
    else:
        rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
        assert list(rows[0]) == ["index", "sum", "twice_0", "twice_1"]
        assert [float(row["sum"]) for row in rows] == pytest.approx(sums.tolist())


def test_parts_of_several_ranks_are_put_back_in_order() -> None:
    index = torch.tensor([0, 2, 4, 1, 3])  # rank 0 had 0, 2, 4
    joined = join_batches([torch.tensor([0.0, 20.0]), torch.tensor([40.0]), torch.tensor([10.0, 30.0])], index)
    assert joined.tolist() == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert join_batches(["a", "b"], index) == ["a", "b"]
    ragged = [{"x": torch.zeros(2), "note": "a"}, {"x": torch.zeros(3), "note": "b"}]
    assert join_batches(ragged, index) == ragged


def test_outputs_that_cannot_be_joined_keep_their_batches(tmp_path: Path) -> None:
    class Odd(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return Pair(batch.sum(), f"batch {batch_idx}")

    writer = PredictionWriter(tmp_path)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[writer])
    trainer.predict(Odd([0.0]), DataLoader(RandomDataset(32, 10), batch_size=4), return_predictions=False)
    content = torch.load(tmp_path / "predictions.pt", weights_only=False)
    assert content["index"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [output.note for output in content["outputs"]] == ["batch 0", "batch 1", "batch 2"]


def test_an_array_that_can_be_joined_leaves_the_file_of_one_that_could_not(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path)
    writer._write([{"variant_0": "a"}], [[0, 1]], arrays_before=0)
    writer._write([{"variant_1": torch.ones(2)}], [[0, 1]], arrays_before=1)
    found = [
        torch.load(tmp_path / name, weights_only=True)["outputs"] for name in ("predictions.pt", "predictions_1.pt")
    ]
    assert found[0] == [{"variant_0": "a"}]
    assert list(found[1]) == ["variant_1"]


def test_a_refused_table_leaves_no_file(tmp_path: Path) -> None:
    class Scalar(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch.sum()

    writer = PredictionWriter(tmp_path, "csv")
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[writer])
    with pytest.raises(ConfigError, match=r"set predict\.format=pt"):
        trainer.predict(Scalar([0.0]), DataLoader(RandomDataset(32, 4), batch_size=2), return_predictions=False)
    assert not list(tmp_path.iterdir())


def test_csv_refuses_what_is_no_table() -> None:
    with pytest.raises(ConfigError, match=r"needs one number or vector a sample, predict_step's 'prediction' is not"):
        csv_rows(torch.zeros(2, 2, 2), torch.arange(2))
    with pytest.raises(ConfigError, match=r"predict.format=xml is unknown; choose one of pt, csv"):
        PredictionWriter(Path(), "xml")
