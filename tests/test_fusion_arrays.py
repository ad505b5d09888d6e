"""Which variants there are, which train together, and what is refused."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import ConfigError, FusionError, PlPipeError
from pl_pipe.strategies import FusionDDPStrategy, FusionStrategy
from pl_pipe.strategies.fusion.variant_choices import variant_choices
from tests.fused_modules import Classifier, difference, fit_alone, fit_fused, loader, trainer


def test_lists_of_values_are_combined() -> None:
    lists = {"lr": [0.1, 0.2], "dropout": [0.0, 0.5], "kind": "perceptron"}
    grid = variant_choices(lists, combine="grid", trials=None)
    assert [(one["lr"], one["dropout"]) for one in grid] == [(0.1, 0.0), (0.1, 0.5), (0.2, 0.0), (0.2, 0.5)]
    zipped = variant_choices(lists, combine="zip", trials=None)
    assert zipped == [
        {"lr": 0.1, "dropout": 0.0, "kind": "perceptron"},
        {"lr": 0.2, "dropout": 0.5, "kind": "perceptron"},
    ]
    with pytest.raises(ConfigError, match="dropout has 2"):
        variant_choices({"lr": [1, 2, 3], "dropout": [1, 2]}, combine="zip", trials=None)


def test_trials_are_read_from_files(tmp_path: Path) -> None:
    table = tmp_path / "trials.csv"
    table.write_text("lr,optimizer,width\n1e-3,adamw,4\n0.1,sgd,\n")
    found = variant_choices(None, combine="grid", trials=table)
    assert found == [{"lr": 0.001, "optimizer": "adamw", "width": 4}, {"lr": 0.1, "optimizer": "sgd"}]
    listed = tmp_path / "trials.json"
    listed.write_text(json.dumps(found))
    assert variant_choices(None, combine="grid", trials=listed) == found
    with pytest.raises(ConfigError, match="both variants and trials"):
        variant_choices([{"lr": 1}], combine="grid", trials=table)
    table.write_text("lr,width\n1\n")
    with pytest.raises(ConfigError, match="1 values in line 2 for 2 names"):
        variant_choices(None, combine="grid", trials=table)
    table.write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="is no text"):
        variant_choices(None, combine="grid", trials=table)
    listed.write_text("3")
    with pytest.raises(ConfigError, match="variants is 3; give a list"):
        variant_choices(None, combine="grid", trials=listed)
    with pytest.raises(ConfigError, match="cannot be read"):
        variant_choices(None, combine="grid", trials=tmp_path / "absent.csv")


def test_other_architectures_are_arrays_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Each equals its separate run, as if it had been trained first."""
    variants = [{"lr": 0.1}, {"lr": 0.1, "width": 3}, {"lr": 0.02}, {"lr": 0.02, "width": 3}]
    stop = EarlyStopping("val_loss", patience=100)
    caplog.set_level("INFO")
    fused, running = fit_fused(variants, options={"callbacks": [stop], "max_epochs": 2})
    assert "in 2 arrays, one after another: 0, 2; 1, 3" in caplog.text
    for number, variant in enumerate(variants):
        alone, _ = fit_alone(variant, options={"max_epochs": 2})
        assert difference(alone, fused.variants[number]) <= 1e-9
    assert running.global_step == 14
    assert {row.number for row in fused.leaderboard.rows if row.best is not None} == {0, 1, 2, 3}
    (found,) = running.test(running.lightning_module, loader(shuffle=False), verbose=False)
    assert len(found) == 4


@pytest.mark.slow
def test_arrays_are_no_wider_than_asked_and_go_on_from_the_later_one(tmp_path: Path) -> None:
    variants = [{"lr": 0.1}, {"lr": 0.05}, {"lr": 0.02}]
    strategy = {"max_array": 2}
    whole, _ = fit_fused(variants, strategy=strategy)
    keeper = ModelCheckpoint(tmp_path, save_last=True)
    half, _ = fit_fused(variants, strategy=strategy, options={"max_epochs": 2, "callbacks": [keeper]})
    for number, module in enumerate(half.variants):
        alone, _ = fit_alone(variants[number], options={"max_epochs": 2})
        assert difference(module, alone) <= 1e-9
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(variants, **strategy)
    resumed_by = trainer(strategy=resumed)
    resumed_by.fit(Classifier(), loader(), loader(shuffle=False), ckpt_path=keeper.last_model_path)
    assert difference(resumed.variants[2], whole.variants[2]) == 0
    assert difference(resumed.variants[0], half.variants[0]) <= 1e-6  # trained before, and not again


class StoppedError(Exception):
    """Of a run that ends in the middle."""


class StopsInSecondArray(L.Callback):
    def __init__(self, first: int) -> None:
        self._first = first

    def on_train_epoch_start(self, running: L.Trainer, module: L.LightningModule) -> None:
        strategy: Any = running.strategy
        if strategy.training.variants[0].number == self._first and running.current_epoch == 2:
            raise StoppedError


@pytest.mark.slow
def test_a_run_of_several_architectures_goes_on_with_all_of_them(tmp_path: Path) -> None:
    """Whose numbers take turns, so that an array's first number does not say which came before."""
    variants = [{"lr": 0.1}, {"lr": 0.1, "width": 3}, {"lr": 0.02}, {"lr": 0.02, "width": 3}]
    whole, _ = fit_fused(variants)

    def keeper() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, save_last=True, enable_version_counter=False)

    with pytest.raises(StoppedError):
        fit_fused(variants, options={"callbacks": [keeper(), StopsInSecondArray(1)]})
    L.seed_everything(1, verbose=False)
    resumed = FusionStrategy(variants)
    trainer(strategy=resumed, callbacks=[keeper()]).fit(Classifier(), loader(), loader(shuffle=False), ckpt_path="last")
    for number, module in enumerate(resumed.variants):
        assert difference(module, whole.variants[number]) <= 1e-6, number


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader[Any]:
        data = loader().dataset
        assert isinstance(data, TensorDataset)
        return DataLoader(data, batch_size=self.hparams["batch_size"])


def test_batch_sizes_are_arrays_of_their_own() -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy({"batch_size": [4, 13], "lr": [0.1, 0.2]})
    data = Data()
    trainer(strategy=fused, max_epochs=1).fit(Classifier(), datamodule=data)
    assert data.hparams["batch_size"] == 4
    assert [row.steps for row in sorted(fused.leaderboard.rows, key=lambda row: row.number)] == [7, 7, 2, 2]
    L.seed_everything(1, verbose=False)
    alone = Classifier(lr=0.2)
    trainer(max_epochs=1).fit(alone, datamodule=Data(13))
    assert difference(alone, fused.variants[3]) <= 1e-9
    with pytest.raises(ConfigError, match="LightningDataModule"):
        trainer(strategy=FusionStrategy({"batch_size": [4, 13]})).fit(Classifier(), loader())


def test_a_factory_builds_variants() -> None:
    def build(rate: float, seed: int = 3) -> Classifier:
        torch.manual_seed(seed)
        return Classifier(lr=rate)

    fused, _ = fit_fused([{"rate": 0.1}, {"rate": 0.2, "seed": 4}], strategy={"factory": build})
    assert [module.hparams["lr"] for module in fused.variants] == [0.1, 0.2]


class Several(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Unsaved(L.LightningModule):
    def __init__(self, size: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("module", "variants", "options", "message"),
    [
        (Classifier, [{"learning_rate": 0.1}], {}, "'learning_rate'.*it has kind, lr, weight_decay"),
        (lambda: Unsaved(3), [{"size": 4}], {}, "save_hyperparameters"),
        (Several, [{"lr": 0.1}, {"lr": 0.2}], {}, r"several optimizers.*self\.automatic_optimization = False"),
        (Classifier, [0.1, 0.2], {}, r"variants\[0\] is 0.1"),
        (Classifier, [{"lr": 0.1}], {"formulation": "vmap"}, "formulation=vmap is unknown"),
        (Classifier, [{"lr": 0.1}], {"max_array": 0}, "max_array=0"),
        (Classifier, [{"lr": 0.1}], {"fuse_except": "network"}, "give a list of names"),
        (Classifier, [{"lr": 0.1}, {"lr": 0.2}], {"fuse_except": ["netwrk"]}, "network"),
        (Classifier, [{"lr": 0.1}], {"seeds": [1, 2]}, "seeds: 2, variants: 1"),
        (Classifier, {"lr": []}, {}, "empty list"),
        (Classifier, {"lr": [1]}, {"combine": "product"}, "choose grid or zip"),
        (Classifier, [{"seed": -1}], {}, "seed is -1"),
        (Classifier, [{"seed": "x"}], {}, "seed='x'; give a whole number"),
        (Classifier, 3, {}, "variants is 3; give a list of mappings"),
        (Classifier, "lr", {}, "variants is 'lr'; give a list of mappings"),
        (Classifier, [{"lr": 0.1}, {"lr": -1.0}], {}, r"variant 1 \(lr=-1.0\): ValueError: Invalid learning rate"),
        (
            Classifier,
            [{"lr": 0.1}, {"dropout": 2.0}],
            {},
            r"variant 1 \(dropout=2.0\): ValueError: dropout",
        ),
        (Classifier, [{"lr": 0.1}], {"factory": 3}, "factory is 3, which cannot be called"),
        (Classifier, [{"lr": 0.1}], {"factory": lambda lr: 1 / 0}, r"variant 0 \(lr=0.1\): ZeroDivisionError"),
        (Classifier, [{"lr": 0.1}], {"max_array": 1.5}, "max_array=1.5"),
        (Classifier, [{"lr": 0.1}], {"monitor": 3}, "monitor=3 is no name"),
        (Classifier, [{"lr": 0.1}], {"folder": __file__}, "folder=.* cannot be made"),
    ],
)
def test_what_cannot_be_is_refused(module: Any, variants: Any, options: Any, message: str) -> None:
    with pytest.raises(PlPipeError, match=message):
        trainer(strategy=FusionStrategy(variants, **options)).fit(module(), loader())


@pytest.mark.parametrize("strategy", [FusionStrategy, FusionDDPStrategy])
def test_a_misspelt_option_is_refused(strategy: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"varaints=.* is no option of {strategy.__name__}; it has variants, factory"
    ):
        strategy(varaints=[{"lr": 0.1}])
    with pytest.raises(ConfigError, match="find_unused_parameters=True is no option"):
        strategy([{"lr": 0.1}], find_unused_parameters=True)  # of a wrapper that is not used here
    assert strategy([{"lr": 0.1}], accelerator=None, precision_plugin=None).choices == [{"lr": 0.1}]


def test_callbacks_that_change_one_model_are_refused() -> None:
    callback = StochasticWeightAveraging(swa_lrs=0.1)
    with pytest.raises(ConfigError, match="StochasticWeightAveraging"):
        trainer(strategy=FusionStrategy([{"lr": 0.1}, {"lr": 0.2}]), callbacks=[callback]).fit(Classifier(), loader())


def test_several_devices_are_for_the_other_strategy() -> None:
    with pytest.raises(ConfigError, match="FusionDDPStrategy"):
        trainer(strategy=FusionStrategy([{"lr": 0.1}]), devices=2).fit(Classifier(), loader())


def test_a_step_that_reads_numbers_falls_back_and_counts_once(caplog: pytest.LogCaptureFixture) -> None:
    """Batch norm, metrics and counters of the failed attempts are taken back."""

    class Reading(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.item() > 2.0 + self.hparams["lr"] else loss

    fused = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}])
    L.seed_everything(1, verbose=False)
    running = trainer(strategy=fused)
    running.fit(Reading(), loader(), loader(shuffle=False))
    assert "model array" in caplog.text
    for number, lr in enumerate((0.1, 0.2)):
        L.seed_everything(1, verbose=False)
        alone, plain = Reading(lr=lr), trainer()
        plain.fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9
        assert fused.variants[number].steps == 21
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


def test_a_late_failure_is_taken_back_too() -> None:
    """The step can be fused until the numbers that it reads part, in the third epoch."""

    class Late(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.steps > 16 and loss > 2.0:
                return loss * 0.5
            return loss

    fused = FusionStrategy([{"lr": 0.3}, {"lr": 0.001}], formulation="auto")
    L.seed_everything(1, verbose=False)
    running = trainer(strategy=fused)
    running.fit(Late(), loader(), loader(shuffle=False))
    for number, lr in enumerate((0.3, 0.001)):
        L.seed_everything(1, verbose=False)
        alone, plain = Late(lr=lr), trainer()
        plain.fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9
        assert (
            abs(running.callback_metrics[f"train_acc/variant_{number}"] - plain.callback_metrics["train_acc"]) <= 1e-9
        )


class Mistaken(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ValueError("a mistake of the step's own")


def test_an_error_of_the_steps_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="of the step's own"):
        trainer(strategy=FusionStrategy([{"lr": 0.1}, {"lr": 0.2}])).fit(Mistaken(), loader())
    assert "not computed as" not in caplog.text


class Wide(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")


def test_an_array_that_does_not_fit_says_which_would() -> None:
    variants = [{"lr": 0.1 * (place + 1)} for place in range(4)]
    with pytest.raises(FusionError, match=r"4 variants do not fit into the memory of cpu.*9 GiB.*max_array=2"):
        trainer(strategy=FusionStrategy(variants, max_array=4)).fit(Wide(), loader())
    with pytest.raises(FusionError, match=r"one variant's step does not fit .* make batches smaller"):
        trainer(strategy=FusionStrategy(variants[:1])).fit(Wide(), loader())
