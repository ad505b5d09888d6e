"""Scripts as users write them: each variant is what the same script gives without fusion."""

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from fsspec.core import url_to_fs
from lightning.pytorch.callbacks import BackboneFinetuning, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.errors import CheckpointError, ConfigError, FusionError
from pl_pipe.strategies import FusionDDPStrategy, FusionStrategy

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.01}]
BATCHES = 6


class Regression(L.LightningModule):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return ((self.net(x) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def loader() -> DataLoader[Any]:
    x = torch.randn(4 * BATCHES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(**options: Any) -> L.Trainer:
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        **{**plain, "enable_model_summary": False, "accelerator": "cpu", "precision": 64, "max_epochs": 2, **options}
    )


def fused(
    kind: type[L.LightningModule], *loaders: Any, formulation: str = "auto", **options: Any
) -> tuple[list[Any], L.Trainer]:
    L.seed_everything(1, verbose=False)
    strategy = FusionStrategy(VARIANTS, formulation=formulation)
    running = trainer(strategy=strategy, **options)
    running.fit(kind(), *loaders or (loader(),))
    return strategy.variants, running


def alone(kind: type[L.LightningModule], *loaders: Any, number: int, **options: Any) -> tuple[Any, L.Trainer]:
    L.seed_everything(1, verbose=False)
    running = trainer(**options)
    module = kind(**VARIANTS[number])
    running.fit(module, *loaders or (loader(),))
    return module, running


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        assert_same(list(found.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    else:
        assert found == expected


class Skipping:
    """A loader whose third batch could not be read."""

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(loader()):
            yield None if number == 2 else batch


class Listening(Regression):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.heard: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 4:
            return None
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "twice": 2 * loss.detach()} if batch_idx == 5 else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch is None else super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(outputs)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(outputs)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_hooks_hear_what_plain_lightning_gives_them(accumulated: int) -> None:
    """Also of a batch that is None, a step that returns None, and a loss that is a share of an update's."""
    variants, _ = fused(Listening, Skipping(), Skipping(), accumulate_grad_batches=accumulated)
    for number, variant in enumerate(variants):
        one, _ = alone(Listening, Skipping(), Skipping(), number=number, accumulate_grad_batches=accumulated)
        assert_same(variant.heard, one.heard)
        assert_same(list(variant.parameters()), list(one.parameters()))


def test_trainers_and_callbacks_are_copied_and_pickled(tmp_path: Path) -> None:
    for strategy in (FusionStrategy(VARIANTS), FusionDDPStrategy(VARIANTS)):
        assert copy.deepcopy(strategy).choices == pickle.loads(pickle.dumps(strategy)).choices == VARIANTS
    callbacks = [EarlyStopping("val_loss"), ModelCheckpoint(tmp_path), LearningRateMonitor(), Timer("00:01:00:00")]
    running = trainer(
        strategy=FusionStrategy(VARIANTS), callbacks=callbacks, enable_checkpointing=True, logger=True,
        default_root_dir=tmp_path,
    )  # fmt: skip
    copied = copy.deepcopy(running)
    model = Regression()
    running.fit(model, loader(), loader())
    assert copied.global_step == 0
    copied.fit(Regression(), loader(), loader())
    for callback in running.callbacks:  # type: ignore[attr-defined]
        assert callback.log == model.log  # as plain Lightning leaves it
        copy.deepcopy(callback)
        assert vars(pickle.loads(pickle.dumps(callback))).keys() == vars(callback).keys()
    for whole in (running, running.strategy):
        copy.deepcopy(whole)
        pickle.loads(pickle.dumps(whole))


class NeedsItsLoss(torch.optim.Optimizer):
    """Goes by the loss; its step has no default for the closure."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.evaluations = 1

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for _ in range(self.evaluations):
            loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= self.param_groups[0]["lr"] * min(1.0, float(loss)) * parameter.grad
        return loss


class GoesByItsLoss(Regression):
    def configure_optimizers(self) -> Any:
        return NeedsItsLoss(self.parameters(), self.hparams["lr"])


class EvaluatesTwice(GoesByItsLoss):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.evaluations = 2
        return optimizer


@pytest.mark.parametrize("accumulated", [1, 2])
def test_optimizers_are_given_the_closure_that_they_ask_for(accumulated: int) -> None:
    variants, _ = fused(GoesByItsLoss, accumulate_grad_batches=accumulated)
    for number, variant in enumerate(variants):
        one, _ = alone(GoesByItsLoss, number=number, accumulate_grad_batches=accumulated)
        assert_same(list(variant.parameters()), list(one.parameters()))
    with pytest.raises(FusionError, match="evaluates the step again"):
        fused(EvaluatesTwice)


class Layers(nn.Sequential):
    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


class Configured(Regression):
    """Built by LightningCLI, with a class among its hyper-parameters."""

    def __init__(self, net: Layers, lr: float = 0.05, decay: float = 0.0, **options: Any) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.net = net

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], weight_decay=self.hparams["decay"])


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()


CLI = ["fit", "--seed_everything=1", "--trainer.precision=64", "--trainer.accelerator=cpu", "--trainer.max_epochs=2"]
CLI += ["--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
CLI += ["--trainer.enable_checkpointing=false", "--trainer.devices=1", f"--model.net={__name__}.Layers"]
STEPPED = ["--optimizer=Adam", "--optimizer.lr=0.1", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1"]


def command_line(*more: str) -> Any:
    from lightning.pytorch.cli import LightningCLI

    return LightningCLI(Configured, Data, args=[*CLI, *more], save_config_callback=None)


@pytest.mark.parametrize(("name", "plain"), [("FusionStrategy", "auto"), ("FusionDDPStrategy", "ddp")])
@pytest.mark.parametrize(
    "more", [[], STEPPED], ids=["its own optimizer", "optimizer and scheduler of the command line"]
)
def test_variants_of_lightning_cli(tmp_path: Path, name: str, plain: str, more: list[str]) -> None:
    pytest.importorskip("jsonargparse")
    asked = json.dumps([{"lr": 0.1}, {"lr": 0.01, "decay": 0.5}])
    by_argument = command_line(
        f"--trainer.strategy=pl_pipe.strategies.{name}", f"--trainer.strategy.variants={asked}", *more
    )
    config = tmp_path / "config.yaml"
    config.write_text(
        f"trainer:\n  strategy:\n    class_path: pl_pipe.strategies.{name}\n    init_args: {{variants: {asked}}}\n"
    )
    by_file = command_line(f"--config={config}", *more)
    for number, own in enumerate((["--model.lr=0.1"], ["--model.lr=0.01", "--model.decay=0.5"])):
        one = command_line(*own, *more, f"--trainer.strategy={plain}").model
        for cli in (by_argument, by_file):
            variant = cli.trainer.strategy.variants[number]
            assert_same(list(variant.parameters()), list(one.parameters()))
            assert dict(variant.hparams) == dict(one.hparams)


MIXED = """
import pytorch_lightning as pl
import lightning as L
import torch
from pl_pipe.strategies import FusionDDPStrategy, FusionStrategy

class Own(L.LightningModule):
    def training_step(self, batch): ...
    def configure_optimizers(self): ...

class Other(pl.LightningModule): ...

class OtherData(pl.LightningDataModule):
    def train_dataloader(self): ...

options = {"accelerator": "cpu", "logger": False}
for run in (
    lambda: pl.Trainer(strategy=FusionStrategy([{}]), **options).fit(Other()),
    lambda: pl.Trainer(strategy=FusionDDPStrategy([{}]), **options).fit(Other()),
    lambda: L.Trainer(strategy=FusionStrategy([{}]), **options).fit(Own(), datamodule=OtherData()),
    lambda: L.Trainer(strategy=FusionStrategy([{}], factory=Other), **options).fit(Own(), [1]),
):
    try:
        run()
    except Exception as error:
        print("told" if "write `import lightning as L`" in str(error) else error)
"""


def test_the_other_copy_of_lightning_is_refused_in_words() -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", MIXED], cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["told"] * 4 + [""], done.stdout + done.stderr


class Decaying(Regression):
    def on_train_epoch_end(self) -> None:
        self.trainer.callback_metrics["drawn"] = torch.tensor([self.hparams["lr"], 1.0])
        self.trainer.callback_metrics["rate"] = torch.tensor(self.hparams["lr"])
        assert self.trainer.callback_metrics["rate"] == torch.tensor(self.hparams["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


@pytest.mark.parametrize("monitor", ["lr-SGD", "lr-SGD-momentum", "rate"])
def test_metrics_that_callbacks_and_hooks_write_are_monitored(tmp_path: Path, monitor: str) -> None:
    def options() -> dict[str, Any]:
        callbacks = [EarlyStopping(monitor, mode="max", patience=2), LearningRateMonitor(log_momentum=True)]
        return {"callbacks": callbacks, "logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "max_epochs": 9}

    variants, running = fused(Decaying, **options())
    for number, variant in enumerate(variants):
        one, plain = alone(Decaying, number=number, **options())
        assert plain.current_epoch == running.current_epoch < 9
        assert_same(list(variant.parameters()), list(one.parameters()))
        assert running.callback_metrics[f"{monitor}/variant_{number}"] == plain.callback_metrics[monitor]
    assert running.callback_metrics[monitor] == running.callback_metrics[f"{monitor}/variant_0"]


class Teacher(Regression):
    """Keeps the weights that training begins with."""

    def on_fit_start(self) -> None:
        self.first = copy.deepcopy(self.net.state_dict())


def test_hooks_before_a_resumed_training_know_the_checkpoint(tmp_path: Path) -> None:
    """Weights, and that the time is over."""
    timer = Timer(timedelta(microseconds=1), interval="epoch")
    variants, running = fused(Teacher, callbacks=[timer], max_epochs=9)
    running.save_checkpoint(tmp_path / "one.ckpt")
    assert running.current_epoch == 1
    L.seed_everything(2, verbose=False)
    again = FusionStrategy(VARIANTS)
    resumed = trainer(strategy=again, callbacks=[Timer(timedelta(microseconds=1))], max_epochs=9)
    resumed.fit(Teacher(), loader(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert resumed.global_step == running.global_step
    for variant, one in zip(again.variants, variants, strict=True):
        assert_same(dict(variant.first), dict(one.net.state_dict()))


class OfOneLoader(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...


def test_hooks_that_lack_an_argument_are_told_of_it() -> None:
    loaders = loader(), [loader(), loader()]
    hint = r"no `dataloader_idx` argument in `OfOneLoader\.on_validation_batch_end\(\)`. Try adding `dataloader_idx=0`"
    with pytest.raises(RuntimeError, match=hint):
        alone(OfOneLoader, *loaders, number=0)
    with pytest.raises(RuntimeError, match=hint):
        fused(OfOneLoader, *loaders)


@pytest.mark.parametrize("store", ["memory", "file"])
def test_runs_are_kept_where_a_url_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    monkeypatch.chdir(tmp_path)
    root = f"memory://runs{tmp_path}" if store == "memory" else f"file://{tmp_path}/runs"
    options = {"default_root_dir": root, "enable_checkpointing": True}
    variants, running = fused(Regression, loader(), loader(), **options)
    files, place = url_to_fs(f"{root}/checkpoints")
    found = {path.removeprefix(f"{place}/") for path in files.find(place)}
    assert {"variants.csv", "variants.png", "variants/variant_0.ckpt", "variants/variant_1.ckpt"} < found
    assert b"lr" in files.cat(f"{place}/variants.csv")
    for number, variant in enumerate(variants):
        path = f"{root}/checkpoints/variants/variant_{number}.ckpt"
        goes_on = trainer(max_epochs=3)
        goes_on.fit(Regression(**VARIANTS[number]), loader(), ckpt_path=path, weights_only=False)
        assert goes_on.global_step == 3 * BATCHES
        state = torch.load(io.BytesIO(files.cat(url_to_fs(path)[1])), weights_only=False)["state_dict"]
        assert_same(dict(state), dict(variant.state_dict()))
    best = running.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    running.validate(variants[0], loader(), ckpt_path=best, verbose=False)
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}
    with pytest.raises(ConfigError, match="folder=nothing://here cannot be made"):
        trainer(strategy=FusionStrategy(VARIANTS, folder="nothing://here")).fit(Regression(), loader())


def test_remedies_are_what_a_script_can_do(tmp_path: Path) -> None:
    plain = r'Trainer\(strategy="auto"\) \(strategy=single on the command line\)'
    with pytest.raises(ConfigError, match=rf"BackboneFinetuning changes one model.*{plain}"):
        fused(Regression, callbacks=[BackboneFinetuning()])
    variants, running = fused(Regression)
    with pytest.raises(ConfigError, match=rf"is variant 1 of those.*{plain}"):
        running.fit(variants[1], loader())
    _, separate = alone(Regression, number=0)
    separate.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match=plain):
        running.validate(Regression(), loader(), ckpt_path=tmp_path / "one.ckpt")
    with pytest.raises(ConfigError, match="combine=all is unknown"):
        FusionStrategy(VARIANTS, combine="all")


class Adversarial(L.LightningModule):
    """Two optimizers and schedulers by hand; the discriminator's may step less often in one variant."""

    def __init__(self, lr: float = 0.05, every: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.heard: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        real, one = batch[0], torch.ones(len(batch[0]), 1, dtype=batch[0].dtype)
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        made = self.generator(torch.randn_like(real))
        loss = F.binary_cross_entropy_with_logits(self.discriminator(made), one)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.log("g_loss", loss, on_step=True, on_epoch=True)
        if batch_idx % self.hparams["every"]:
            return None
        with second.toggle_model():
            judged = self.discriminator(real), self.discriminator(made.detach())
            loss = sum(F.binary_cross_entropy_with_logits(out, one * (1 - k)) for k, out in enumerate(judged))
            second.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(second, gradient_clip_val=0.5)
            second.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()
        return {"loss": loss, "step": self.global_step}

    def on_after_backward(self) -> None:
        self.log("norm", sum(one.grad.norm() for one in self.parameters() if one.grad is not None))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append((outputs, self.global_step, len(self.trainer.optimizers)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(self.generator(batch[0])).mean())

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=self.hparams["lr"])
        second = torch.optim.Adam(self.discriminator.parameters(), lr=2 * self.hparams["lr"])
        return [first, second], [StepLR(first, 1, 0.5), StepLR(second, 1, 0.9)]


class ByHand(Regression):
    """Gradients of two batches are added up; what is left is stepped with at the epoch's end."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 4)
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def on_train_epoch_end(self) -> None:
        self.optimizers().step()


class ByClosure(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        def closure() -> Tensor:
            self.optimizers().zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        self.optimizers().step(closure)

    def on_train_epoch_end(self) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=self.hparams["lr"])


class WarmingUp(Regression):
    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.hparams["lr"] * min(1.0, (self.trainer.global_step + 1) / 8)
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Scaling(Regression):
    def backward(self, loss: Tensor) -> None:
        (3 * loss).backward()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.net[0].weight.grad.norm())


class Quadratic(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=self.hparams["lr"], max_iter=3)


class Seen(L.Callback):
    """What it is told of each variant, within the step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.seen.append((pl_module.hparams["lr"], float(loss)))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append((pl_module.hparams["lr"], optimizer.param_groups[0]["lr"]))


ONCE = [(Adversarial, 1), (ByHand, 1), (ByClosure, 1), (WarmingUp, 1), (Scaling, 1), (Quadratic, 1)]
TWICE = [(WarmingUp, 2), (Scaling, 2), (Quadratic, 2)]


@pytest.mark.parametrize(("kind", "accumulated"), [*ONCE, *TWICE])
def test_steps_of_their_own_are_trained_in_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[L.LightningModule], accumulated: int
) -> None:
    """Bit for bit, with what hooks and callbacks see, what is logged, and checkpoints that plain Lightning takes."""
    choices: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.01}, {"lr": 0.03}]
    if kind is Adversarial:
        choices[1]["every"] = 2

    def run(model: Any, strategy: Any = "auto", epochs: int = 2, **options: Any) -> tuple[L.Trainer, Seen]:
        seen = Seen()
        running = trainer(strategy=strategy, callbacks=[seen], max_epochs=epochs, accumulate_grad_batches=accumulated)
        running.fit(model, loader(), loader(), weights_only=False, **options)
        return running, seen

    L.seed_everything(1, verbose=False)
    caplog.set_level("INFO")
    fusion = FusionStrategy(choices, folder=tmp_path)
    running, seen = run(kind(), fusion)
    assert sum("one after another within each batch" in line for line in caplog.messages) == 1
    running.save_checkpoint(tmp_path / "all.ckpt")
    for number, choice in enumerate(choices):
        L.seed_everything(1, verbose=False)
        one = kind(**choice)
        plain, told = run(one)
        variant = fusion.variants[number]
        assert_bits(dict(variant.state_dict()), dict(one.state_dict()))
        assert_bits(getattr(variant, "heard", None), getattr(one, "heard", None))
        assert [entry for entry in seen.seen if entry[0] == choice["lr"]] == told.seen
        for name, value in plain.callback_metrics.items():
            assert_bits(running.callback_metrics[f"{name}/variant_{number}"], value)
        plain.save_checkpoint(tmp_path / "one.ckpt")
        expected = torch.load(tmp_path / "one.ckpt", weights_only=False)
        found = torch.load(tmp_path / "variants" / f"variant_{number}.ckpt", weights_only=False)
        for name in ("epoch", "global_step", "optimizer_states", "lr_schedulers"):
            assert_bits(found[name], expected[name])
        ends = [kind(**choice), kind(**choice)]
        for end, file in zip(ends, (f"variants/variant_{number}.ckpt", "one.ckpt"), strict=True):
            L.seed_everything(2, verbose=False)
            run(end, epochs=3, ckpt_path=tmp_path / file)
        assert_bits(dict(ends[0].state_dict()), dict(ends[1].state_dict()))
    whole, resumed = FusionStrategy(choices), FusionStrategy(choices)
    L.seed_everything(1, verbose=False)
    run(kind(), whole, epochs=3)
    run(kind(), resumed, epochs=3, ckpt_path=tmp_path / "all.ckpt")
    for variant, other in zip(resumed.variants, whole.variants, strict=True):
        assert_bits(dict(variant.state_dict()), dict(other.state_dict()))


def assert_bits(found: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other


def test_what_was_done_to_the_given_module_is_not_done_to_variants_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    L.seed_everything(1, verbose=False)
    model = Regression()
    model.net[0].requires_grad_(False)
    strategy = FusionStrategy(VARIANTS)
    trainer(strategy=strategy).fit(model, loader())
    told = "net.0.weight of the given Regression is frozen (requires_grad=False), and of its variants"
    assert [told in record.getMessage() for record in caplog.records if "of the given" in record.getMessage()] == [True]


class TakesParametersOfTheTrainer(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trainer.model.parameters(), lr=self.hparams["lr"])


class UsesModelOfTheTrainer(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert isinstance(self.trainer.model, UsesModelOfTheTrainer)
        return self.loss(batch) + 0.01 * sum(one.pow(2).sum() for one in self.trainer.model.parameters())


@pytest.mark.parametrize("kind", [TakesParametersOfTheTrainer, UsesModelOfTheTrainer])
@pytest.mark.parametrize("formulation", ["auto", "one by one", "model array"])
def test_the_model_of_the_trainer_is_each_variants_own(kind: type[Regression], formulation: str) -> None:
    variants, _ = fused(kind, formulation=formulation)
    for number in range(len(VARIANTS)):
        expected, _ = alone(kind, number=number)
        for name, value in expected.state_dict().items():
            assert torch.allclose(variants[number].state_dict()[name], value, rtol=0, atol=1e-9), name


# ---- outside of a run, and callbacks written for one model


def test_a_trainer_knows_its_model_before_a_run(tmp_path: Path) -> None:
    """`strategy.connect(model)` is how scripts write a checkpoint without training, or look at loaders."""
    running = trainer(strategy=FusionStrategy(VARIANTS))
    model = Regression()
    running.strategy.connect(model)
    assert running.lightning_module is model
    with pytest.raises(ConfigError, match="nothing has been trained"):
        running.save_checkpoint(tmp_path / "none.ckpt")
    with pytest.raises(ConfigError, match=r"give ckpt_path to trainer\.fit"):
        running.strategy.load_model_state_dict({"state_dict": model.state_dict()})
    running.fit(model, loader())
    assert running.global_step == 2 * BATCHES


def test_weights_alone_are_gone_on_from_as_without_fusion(tmp_path: Path) -> None:
    """A file with the weights, made by hand, has no states of optimizers."""
    model = Regression()
    by_hand = {"state_dict": model.state_dict(), "optimizer_states": [], "lr_schedulers": []}
    torch.save({**by_hand, "pytorch-lightning_version": "2.0.0"}, tmp_path / "weights.ckpt")
    strategy = FusionStrategy([{"lr": 0.05}])
    plain = Regression()
    trainer(strategy=strategy).fit(Regression(), loader(), ckpt_path=tmp_path / "weights.ckpt")
    trainer().fit(plain, loader(), ckpt_path=tmp_path / "weights.ckpt")
    assert_same(strategy.variants[0].net.state_dict(), plain.net.state_dict())


class Collecting(L.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.found.append(outputs)

    on_test_batch_end = on_validation_batch_end


def test_callbacks_are_given_what_the_first_variant_returned() -> None:
    class Both(Regression):
        test_step = Regression.validation_step

    collecting = Collecting()
    variants, running = fused(Both, loader(), loader(), callbacks=[collecting], num_sanity_val_steps=0, max_epochs=1)
    running.test(running.lightning_module, loader(), verbose=False)
    assert len(collecting.found) == 2 * BATCHES
    for found, batch in zip(collecting.found, [*loader(), *loader()], strict=True):
        assert abs(found - variants[0].loss(batch)) <= 1e-12
