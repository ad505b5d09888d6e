"""Evaluation of variants after their training: which ones, with which weights, and nothing lost by it."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from pl_pipe.callbacks.predictions import PredictionWriter
from pl_pipe.errors import CheckpointError, ConfigError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, fit_fused, loader, trainer
from tests.test_fusion_arrays import Data

RATES = [{"lr": 0.1}, {"lr": 0.05}, {"lr": 0.02}]


def assert_same_numbers(found: list[Any], expected: list[Any]) -> None:
    """To rounding: arrays of another width may add up in another order."""
    assert len(found) == len(expected) == 1
    assert found[0] == pytest.approx(expected[0], rel=1e-12)


def test_one_of_the_variants_is_evaluated_alone_and_nothing_is_lost(tmp_path: Path) -> None:
    fused, running = fit_fused(RATES, options={"max_epochs": 2})
    given, before, table = running.lightning_module, fused.variants, str(fused.leaderboard)
    number = fused.leaderboard.best.number
    best = before[number]
    kept = {name: value.clone() for name, value in best.state_dict().items()}
    (found,) = running.test(best, loader(shuffle=False), verbose=False)
    assert list(found) == [f"test_loss/variant_{number}"]
    (plain,) = trainer().test(best, loader(shuffle=False), verbose=False)
    assert found[f"test_loss/variant_{number}"] == pytest.approx(plain["test_loss"], abs=1e-12)
    predicted = running.predict(best, loader(shuffle=False))
    assert predicted is not None
    assert [list(one) for one in predicted] == [[f"variant_{number}"]] * 7
    assert all(torch.equal(value, kept[name]) for name, value in best.state_dict().items())
    assert (fused.variants, str(fused.leaderboard)) == (before, table)
    (all_of_them,) = running.test(given, loader(shuffle=False), verbose=False)
    assert len(all_of_them) == 3
    running.test(best, loader(shuffle=False), verbose=False)
    running.save_checkpoint(tmp_path / "after.ckpt")
    assert torch.load(tmp_path / "after.ckpt")["fusion"]["numbers"] == [0, 1, 2]  # as without the evaluation
    with pytest.raises(ConfigError, match=rf"is variant {number} of those .*strategy=.auto"):
        running.fit(best, loader())


def test_another_model_is_not_evaluated_in_place_of_the_trained_variants(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    fused, running = fit_fused(RATES, options={"max_epochs": 1, "callbacks": [keeper]})
    before, table = fused.variants, str(fused.leaderboard)
    expected = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    with pytest.raises(ConfigError, match=r"would be built anew.*ckpt_path"):
        running.test(Classifier(), loader(shuffle=False), verbose=False)
    assert (fused.variants, str(fused.leaderboard)) == (before, table)
    found = running.test(Classifier(), loader(shuffle=False), verbose=False, ckpt_path=keeper.last_model_path)
    assert_same_numbers(found, expected)
    assert str(fused.leaderboard) == table


class OfSeveralLoaders(Classifier):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx)


def test_predictions_of_several_arrays_and_loaders_are_all_there() -> None:
    fused = FusionStrategy(RATES, max_array=2)
    running = trainer(strategy=fused, max_epochs=1)
    running.fit(OfSeveralLoaders(), loader())
    loaders = [loader(shuffle=False), loader(shuffle=False, batch=13)]
    found: Any = running.predict(running.lightning_module, loaders)
    assert [len(one) for one in found] == [7, 2]
    for batches, source in zip(found, loaders, strict=True):
        for batch, (x, _) in zip(batches, source, strict=True):
            assert list(batch) == ["variant_0", "variant_1", "variant_2"]
            for number, module in enumerate(fused.variants):
                assert torch.equal(batch[f"variant_{number}"], module.eval()(x).argmax(1))


class Predicted(Data):
    def predict_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


def test_predictions_of_several_batch_sizes_are_by_batch() -> None:
    fused, data = FusionStrategy({"batch_size": [4, 13]}), Predicted()
    running = trainer(strategy=fused, max_epochs=1)
    running.fit(Classifier(), datamodule=data)
    found: Any = running.predict(running.lightning_module, datamodule=data)
    both = ["variant_0", "variant_1"]
    assert [list(one) for one in found] == [both, both, *[["variant_0"]] * 5]
    whole = [torch.cat([one[name] for one in found if name in one]) for name in both]
    assert [len(each) for each in whole] == [26, 26]
    (tested,) = running.test(running.lightning_module, loader(shuffle=False), verbose=False)  # whatever its batch size
    assert len(tested) == 2


class NotesBatch(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return f"batch {batch_idx}"


@pytest.mark.parametrize(
    ("model", "files"), [(Classifier, ["predictions.pt"]), (NotesBatch, ["predictions.pt", "predictions_1.pt"])]
)
def test_predictions_of_all_arrays_are_written(tmp_path: Path, model: Any, files: list[str]) -> None:
    """In one file where they are by sample; twice, so that the second call has nothing of the first."""
    fused, data = FusionStrategy({"batch_size": [4, 13]}), Predicted()
    running = trainer(strategy=fused, max_epochs=1, callbacks=[PredictionWriter(tmp_path)])
    running.fit(model(), datamodule=data)
    for _ in range(2):
        running.predict(running.lightning_module, datamodule=data)
        assert sorted(file.name for file in tmp_path.iterdir()) == files
    found = [torch.load(tmp_path / name, weights_only=False)["outputs"] for name in files]
    if model is Classifier:
        assert {name: len(each) for name, each in found[0].items()} == {"variant_0": 26, "variant_1": 26}
    else:
        assert [(len(outputs), list(outputs[0])) for outputs in found] == [(7, ["variant_0"]), (2, ["variant_1"])]


@pytest.mark.parametrize("strategy", [{"max_array": 2}, {}])
def test_a_later_process_evaluates_all_arrays_of_a_checkpoint(tmp_path: Path, strategy: dict[str, Any]) -> None:
    class Named(Classifier):
        """Keeps something of its own in checkpoints."""

        told = 0.0

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["told"] = self.hparams["lr"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.told = checkpoint["told"]

    keeper = ModelCheckpoint(tmp_path, save_last=True)
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(RATES, max_array=2)
    running = trainer(strategy=fused, max_epochs=1, callbacks=[keeper])
    running.fit(Named(), loader(), loader(shuffle=False))
    expected = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    later = FusionStrategy(RATES, **strategy)
    by = trainer(strategy=later)
    found = by.test(Named(), loader(shuffle=False), ckpt_path=keeper.last_model_path, verbose=False)
    assert_same_numbers(found, expected)
    for number, module in enumerate(later.variants):
        assert difference(module, fused.variants[number]) == 0
        assert module.told == RATES[number]["lr"]
    other = trainer(strategy=FusionStrategy([{"lr": 0.3}, *RATES[1:]], **strategy))
    with pytest.raises(CheckpointError, match="give the same variants in the same order"):
        other.test(Named(), loader(shuffle=False), ckpt_path=keeper.last_model_path, verbose=False)


def test_variants_that_a_checkpoint_does_not_have_yet_are_named(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    fit_fused(RATES, strategy={"max_array": 2}, options={"max_epochs": 1, "callbacks": [keeper]})
    first = min(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    by = trainer(strategy=FusionStrategy(RATES, max_array=2))
    with pytest.raises(CheckpointError, match=r"before variant 2 \(lr=0.02\) was trained; give a later one"):
        by.test(Classifier(), loader(shuffle=False), ckpt_path=first, verbose=False)
