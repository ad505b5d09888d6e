"""A variant that leaves ends as a run of its own would: its last hooks, what they log, its checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from pl_pipe.errors import CheckpointError, ConfigError
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion.variant_choices import variant_choices
from pl_pipe.strategies.fusion.variant_names import MAX, MIN, direction
from tests.fused_modules import Classifier, difference, loader, trainer

RATES = (0.1, 0.03, 0.3)


class Ending(Classifier):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.calls: list[str] = []
        self.register_buffer("ends", torch.zeros(()))

    def on_validation_epoch_end(self) -> None:
        self.calls.append(f"validated {self.training}")

    def on_validation_end(self) -> None:
        self.calls.append(f"validation is over {self.training}")

    def on_train_epoch_end(self) -> None:
        self.calls.append(f"epoch {self.training}")
        self.ends += 1
        self.log("ends", self.ends.clone())
        self.log("accuracy", self.train_acc)

    def on_train_end(self) -> None:
        self.calls.append("train")

    def on_fit_end(self) -> None:
        self.calls.append("fit")

    def teardown(self, stage: str) -> None:
        self.calls.append(stage)


class Scheduled(Ending):
    """Lightning asks for the metric after an epoch's last hook."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.hparams["lr"])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Leaves(L.Callback):
    """Variant 1 after the second epoch, before or after the modules' hooks."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def on_validation_end(self, running: L.Trainer, module: L.LightningModule) -> None:
        self._stop(running, "on_validation_end")

    def on_train_epoch_end(self, running: L.Trainer, module: L.LightningModule) -> None:
        self._stop(running, "on_train_epoch_end")

    def _stop(self, running: L.Trainer, hook: str) -> None:
        if hook == self._hook and not running.sanity_checking and running.current_epoch == 1:
            running.strategy.stop_variants([1])  # type: ignore[attr-defined]


class LeavesLate(Leaves, ModelCheckpoint):
    """Lightning calls those that save after the module's own hook."""

    def __init__(self, hook: str) -> None:
        ModelCheckpoint.__init__(self, save_top_k=0)
        Leaves.__init__(self, hook)


def fit(model: L.LightningModule, epochs: int, path: Path | None = None, **options: Any) -> L.Trainer:
    running = trainer(max_epochs=epochs, **options)
    batches, others = loader(shuffle=False), loader(shuffle=False, seed=6)
    running.fit(model, batches, others, ckpt_path=path, weights_only=False)
    return running


def alone(rate: float, epochs: int) -> Ending:
    return run_alone(rate, epochs)[0]


def run_alone(rate: float, epochs: int, kind: type[Ending] = Ending) -> tuple[Ending, L.Trainer]:
    L.seed_everything(1, verbose=False)
    model = kind(lr=rate)
    return model, fit(model, epochs)


@pytest.mark.parametrize("kind", [Leaves, LeavesLate])
@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end"])
def test_a_variant_that_leaves_ends_as_alone(tmp_path: Path, hook: str, kind: Any) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"lr": rate} for rate in RATES], folder=tmp_path)
    fit(Scheduled(), 4, strategy=fused, callbacks=[kind(hook)])
    for number, epochs in enumerate((4, 2, 4)):
        plain, its_trainer = run_alone(RATES[number], epochs, Scheduled)
        assert difference(plain, fused.variants[number]) <= 1e-9, number
        assert fused.variants[number].calls == plain.calls  # type: ignore[union-attr]
        (row,) = [row for row in fused.leaderboard.rows if row.number == number]
        assert row.last["ends"] == epochs
        assert row.last["accuracy"] == pytest.approx(float(its_trainer.callback_metrics["accuracy"]))
        assert fused.variants[number].training
        kept = torch.load(tmp_path / "variants" / f"variant_{number}.ckpt", weights_only=False)
        assert kept["global_step"] == epochs * len(loader())
        (schedule,) = kept["lr_schedulers"]
        assert schedule["last_epoch"] == its_trainer.lr_scheduler_configs[0].scheduler.last_epoch


def test_plain_lightning_goes_on_with_a_variant_that_has_left(tmp_path: Path) -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"lr": rate} for rate in RATES], folder=tmp_path)
    fit(Ending(), 4, strategy=fused, callbacks=[Leaves("on_train_epoch_end")])
    going_on = Ending(lr=RATES[1]).double()
    running = fit(going_on, 4, tmp_path / "variants" / "variant_1.ckpt")
    assert running.global_step == 4 * len(loader())
    assert difference(alone(RATES[1], 4), going_on) <= 1e-9


def test_an_array_that_goes_on_remembers_when_a_variant_left(tmp_path: Path) -> None:
    """Also where the best one is the one that has left."""
    variants = [{"lr": rate} for rate in RATES]
    keeper = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    L.seed_everything(1, verbose=False)
    first = FusionStrategy(variants, monitor="ends", mode="min")  # of which variant 1 will have the fewest
    fit(Ending(), 3, strategy=first, callbacks=[Leaves("on_train_epoch_end"), keeper])
    resumed = FusionStrategy(variants, folder=tmp_path / "after", monitor="ends", mode="min")
    running = fit(Ending(), 4, tmp_path / "last.ckpt", strategy=resumed)
    assert running.global_step == 4 * len(loader())
    steps = [torch.load(tmp_path / "after" / "variants" / f"variant_{k}.ckpt", weights_only=False) for k in range(3)]
    assert [one["global_step"] for one in steps] == [epochs * len(loader()) for epochs in (4, 2, 4)]
    for number, epochs in enumerate((4, 2, 4)):
        assert difference(alone(RATES[number], epochs), resumed.variants[number]) <= 1e-9


# ---- which is the best


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        (("val_acc", "val_acc1", "val_MulticlassAccuracy", "val_BinaryF1Score", "val/f1", "val_mAP50", "R2"), MAX),
        (("val_AveragePrecision", "val_MulticlassAUROC", "val_kappa", "top5", "val_log_likelihood", "bleu"), MAX),
        (("val_loss", "val_dice_loss", "val_f1_loss", "val_iou_error", "val_MeanSquaredError", "perplexity"), MIN),
        (("val_negative_log_likelihood", "BrierScore", "something"), MIN),
    ],
)
def test_names_of_metrics_say_whether_less_is_better(names: tuple[str, ...], mode: str) -> None:
    assert {name: direction(name, {}) for name in names} == dict.fromkeys(names, mode)


class Graded(Classifier):
    """The grade is one of which nobody knows whether more is better."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_grade", torch.tensor(self.hparams["lr"]))


@pytest.mark.parametrize(
    "callback",
    [
        lambda path: ModelCheckpoint(path, monitor="val_grade", mode="max"),
        lambda _: EarlyStopping("val_grade/variant_1", mode="max"),
    ],
)
def test_who_monitors_a_metric_says_which_is_the_best(tmp_path: Path, callback: Any) -> None:
    fused = FusionStrategy([{"lr": rate} for rate in RATES])
    asked = callback(tmp_path)
    running = fit(Graded(), 1, strategy=fused, callbacks=[asked])
    assert fused.leaderboard.monitor == "val_grade"  # rather than a training's loss
    assert [row.number for row in fused.leaderboard.rows] == [2, 0, 1]
    assert float(running.callback_metrics["val_grade"]) == pytest.approx(max(RATES))
    if isinstance(asked, ModelCheckpoint):
        kept = torch.load(asked.best_model_path, weights_only=False)
        assert kept["fusion"]["leading"] == 2


# ---- what is given


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1e-3", 1e-3), ("010", 10), ("1:30", "1:30"), ("no", "no"), ("#ff0000", "#ff0000"), ("a: b", "a: b"),
        ('"a\nb"', "a\nb"), ("True", True), ("null", None), ('"[1, 2]"', [1, 2]), ("@big", "@big"), (" 3 ", 3),
    ],
)  # fmt: skip
def test_cells_of_trials_are_what_they_look_like(tmp_path: Path, cell: str, value: Any) -> None:
    file = tmp_path / "trials.csv"
    file.write_text(f"lr,name\n0.1,{cell}\n")
    (found,) = variant_choices(None, combine="grid", trials=file)
    assert found == {"lr": 0.1, "name": value}
    assert type(found["name"]) is type(value)


def test_a_cell_that_cannot_be_meant_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "trials.csv"
    file.write_text("lr\n\n\n[0.1\n")
    with pytest.raises(ConfigError, match=r"trials.csv has a list or mapping in line 4 that is no JSON"):
        variant_choices(None, combine="grid", trials=file)


def test_lists_in_a_file_are_combined_as_told(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    file.write_text('{"lr": [0.1, 0.03], "weight_decay": [0, 0.001]}')
    assert len(variant_choices(None, combine="grid", trials=file)) == 4
    assert len(variant_choices(None, combine="zip", trials=file)) == 2


def test_seeds_alone_are_variants() -> None:
    """The model as it is, once a seed."""
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(seeds=[3, 4])
    trainer(strategy=fused, max_epochs=1).fit(Classifier(), loader(seed=2), loader(shuffle=False, seed=2))
    for seed, variant in zip((3, 4), fused.variants, strict=True):
        L.seed_everything(seed, verbose=False)
        alone = Classifier()
        trainer(max_epochs=1).fit(alone, loader(seed=2), loader(shuffle=False, seed=2))
        assert difference(alone, variant) <= 1e-9
    assert {row.choice["seed"] for row in fused.leaderboard.rows} == {3, 4}
    with pytest.raises(ConfigError, match="seeds is an empty list"):
        FusionStrategy(seeds=[])


def test_seeds_are_told() -> None:
    fused = FusionStrategy([{}, {}], seeds=[3, 4])
    fit(Ending(), 1, strategy=fused)
    assert "variant 1 (seed=4)" in str(fused.leaderboard)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": 3}, "seeds is 3; give a list"),
        ({"seeds": [1]}, "seeds: 1, variants: 2"),
        ({"seeds": [1, None]}, r"seeds\[1\] is None; choose a whole number"),
        ({"seeds": [1.5, 2]}, r"seeds\[0\] is 1.5; choose"),
        ({"seeds": [1, -1]}, r"seeds\[1\] is -1; choose"),
        ({"fuse_except": [3]}, "fuse_except has 3, which is no name"),
    ],
)
def test_options_of_other_types_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FusionStrategy([{}, {}], **options)


@pytest.mark.parametrize("size", [0, 200])
def test_a_checkpoint_that_was_cut_off_is_told(tmp_path: Path, size: int) -> None:
    variants = [{"lr": rate} for rate in RATES]
    running = fit(Ending(), 1, strategy=FusionStrategy(variants))
    running.save_checkpoint(tmp_path / "whole.ckpt")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes((tmp_path / "whole.ckpt").read_bytes()[:size])
    with pytest.raises(CheckpointError, match=rf"cut.ckpt \({size} bytes\) cannot be read"):
        fit(Ending(), 2, cut, strategy=FusionStrategy(variants))
