"""Steps that are recorded and replayed equal separate runs; what a replay would get wrong is refused."""

import random
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay import captured
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import replayed_steps
from pl_pipe.strategies.fusion.replayed_optimizers import ReplayedOptimizers
from pl_pipe.strategies.fusion.step_ways import StepWays
from tests.fused_modules import Classifier, difference, loader, trainer

DROPPING: list[dict[str, Any]] = [
    {"lr": 0.1, "dropout": 0.2},
    {"lr": 0.03, "weight_decay": 0.05, "smoothing": 0.1, "dropout": 0.5, "gamma": 0.5},
    {"lr": 0.3, "dropout": 0.1, "smoothing": 0.2},
]
STILL: list[dict[str, Any]] = [{"lr": 0.1}, {"lr": 0.03, "weight_decay": 0.05, "gamma": 0.5}, {"lr": 0.3}]


class Recorded(Classifier):
    """Without the counter of steps, which only Python could keep."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = self.criterion(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("batch_acc", self.train_acc(logits, y), on_step=False, on_epoch=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return {"loss": loss, "samples": len(x)}


def fit(
    module: Any, variants: Any, formulation: str, options: Any = None, compiles: Any = "auto", **settings: Any
) -> tuple[Any, L.Trainer]:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation, compile=compiles)
    running = trainer(strategy=fused, **(options or {}))
    kind = settings.get("kind", "perceptron")
    running.fit(module(**settings), loader(kind), loader(kind, shuffle=False))
    return fused, running


def check_equal(found: tuple[Any, L.Trainer], variants: Any, options: Any = None, **settings: Any) -> None:
    fused, running = found
    for number, variant in enumerate(variants):
        L.seed_everything(1, verbose=False)
        alone, plain = Recorded(**{**settings, **variant}), trainer(**(options or {}))
        kind = settings.get("kind", "perceptron")
        plain.fit(alone, loader(kind), loader(kind, shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name


@pytest.mark.parametrize(("formulation", "variants"), [("branches", DROPPING), ("captured array", STILL)])
def test_replayed_steps_equal_separate_runs(formulation: str, variants: Any) -> None:
    """With metrics, logs, a schedule, and a smaller batch that is computed otherwise."""
    found = fit(Recorded, variants, formulation)
    check_equal(found, variants)
    assert found[0].fusion_facts.chosen["training_step"] == formulation


class Plain(Classifier):
    """Logs its loss at every step and nothing else: Lightning takes such numbers over as they are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("step_loss", loss)
        return loss


class Heard(L.Callback):
    """What is logged at each step, and the loss that callbacks are given."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if "step_loss" in name}
        self.logged.append(found)
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_what_is_heard_of_each_step_is_what_separate_runs_say(formulation: str) -> None:
    heard = Heard()
    fit(Plain, STILL, formulation, {"callbacks": [heard]})
    separate = []
    for variant in STILL:
        L.seed_everything(1, verbose=False)
        separate.append(Heard())
        trainer(callbacks=[separate[-1]]).fit(
            Plain(**variant), loader("perceptron"), loader("perceptron", shuffle=False)
        )
    assert len(heard.logged) == len(separate[0].logged) > 10
    for step, logged in enumerate(heard.logged):
        said = [one.logged[step]["step_loss"] for one in separate]
        assert [logged[f"step_loss/variant_{number}"] for number in range(3)] == pytest.approx(said, abs=1e-9)
        assert heard.losses[step] == pytest.approx(sum(said) / 3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("formulation", ["branches", "captured array"])
@pytest.mark.parametrize("kind", ["resnet", "lstm", "transformer"])
def test_replayed_networks_of_other_kinds(kind: str, formulation: str) -> None:
    settings = {"kind": kind, "optimizer": "adamw"}
    check_equal(fit(Recorded, STILL[:2], formulation, **settings), STILL[:2], **settings)


@pytest.mark.parametrize("formulation", ["branches", pytest.param("captured array", marks=pytest.mark.slow)])
def test_replays_with_accumulation_and_clipping(formulation: str) -> None:
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.2}
    check_equal(fit(Recorded, STILL[:2], formulation, options), STILL[:2], options)


@pytest.mark.parametrize("variants", [STILL[:2], DROPPING[:2]])
def test_recordings_in_the_middle_of_an_accumulation(monkeypatch: pytest.MonkeyPatch, variants: Any) -> None:
    """As on a GPU: the array is recorded at the sixth batch, or refused there because it draws random numbers."""
    monkeypatch.setattr(StepWays, "is_replayed", lambda _, hook: hook == "training_step")
    options = {"accumulate_grad_batches": 2}
    check_equal(fit(Recorded, variants, "auto", options, compiles=False), variants, options)


@pytest.mark.slow
@pytest.mark.parametrize("formulation", ["compiled branches", "compiled array"])
def test_compiled_steps_equal_separate_runs(formulation: str) -> None:
    check_equal(fit(Recorded, STILL[:2], formulation), STILL[:2])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropping", "attending"])
def test_compiled_steps_draw_as_separate_runs_do(kind: str) -> None:
    """After convolutions, whose results a compiler may lay out otherwise, for whole channels, and within attention."""
    check_equal(fit(Recorded, DROPPING[:2], "compiled branches", kind=kind), DROPPING[:2], kind=kind)


class ReadsNumber(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


class ReadsEpoch(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * (1 + self.current_epoch)


class ReadsRate(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]


class Draws(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1]) * random.random()


class Appends(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.epochs.append(1)
        return F.cross_entropy(self(batch[0]), batch[1])


class Meters(Recorded):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.meter = SimpleNamespace(count=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.meter.count += 1
        return F.cross_entropy(self(batch[0]), batch[1])


class Writes(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2.0)
        return F.cross_entropy(self(batch[0]), batch[1])


class UsesMetric(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        return F.cross_entropy(logits, batch[1]) * self.train_acc(logits, batch[1]).item()


class ReadsLoss(Recorded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = F.cross_entropy(self(batch[0]), batch[1])
        return loss if loss.item() < 1e9 else None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Classifier, "changes 'steps'"),
        (ReadsNumber, "batch's number"),
        (ReadsEpoch, r"trainer\.current_epoch"),
        (ReadsRate, r"self\.optimizers"),
        (Draws, "random"),
        (Appends, "epochs"),
        (Meters, "meter"),
        (Writes, "in place to the batch"),
        (UsesMetric, "metric's value"),
        (ReadsLoss, r"test_fusion_replay\.py:\d+: the step reads a number"),
    ],
)
def test_what_a_replay_would_get_wrong_is_refused(module: Any, message: str) -> None:
    with pytest.raises(FusionError, match=message):
        fit(module, STILL[:2], "branches", {"max_epochs": 1})


def test_settings_that_change_are_recorded_anew() -> None:
    """A factor that a hook sets for each epoch."""

    class Annealed(Recorded):
        weight = 1.0

        def on_train_epoch_start(self) -> None:
            self.weight = 1.0 / (1 + self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.weight * F.cross_entropy(self(batch[0]), batch[1])

    fused, _ = fit(Annealed, STILL[:2], "branches")
    for number, variant in enumerate(STILL[:2]):
        L.seed_everything(1, verbose=False)
        alone = Annealed(**variant)
        trainer().fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9
    with pytest.raises(FusionError, match="'weight' changes from step to step"):
        fit(Annealed, STILL[:2], "branches", {"max_epochs": 5})


def test_a_diverging_variant_leaves_the_others_alone() -> None:
    variants = [{"lr": 0.1}, {"lr": 1e200}]
    fused, _ = fit(Recorded, variants, "branches")
    assert not all(torch.isfinite(value).all() for value in fused.variants[1].state_dict().values())
    L.seed_everything(1, verbose=False)
    alone = Recorded(**variants[0])
    trainer().fit(alone, loader(), loader(shuffle=False))
    assert difference(alone, fused.variants[0]) <= 1e-9


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_updates_are_part_of_the_replay_unless_someone_looks(formulation: str) -> None:
    """A schedule a step, and a smaller batch in each epoch; hooks between backward and update keep them apart."""
    seen: list[bool] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.strategy.training.leaves_gradients)

    found = fit(Recorded, STILL[:2], formulation, {"callbacks": [Watch()]})
    assert seen[-1]
    assert not seen[0]
    check_equal(found, STILL[:2])
    seen.clear()

    class Looking(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            for module in trainer.strategy.variants:
                for parameter in module.parameters():
                    parameter.grad.mul_(0.0)

    L.seed_everything(1, verbose=False)
    before = [value.clone() for value in Recorded().double().parameters()]
    fused, _ = fit(Recorded, STILL[:1] * 2, formulation, {"callbacks": [Watch(), Looking()]})
    assert not any(seen)
    assert all(torch.equal(*pair) for pair in zip(before, fused.variants[1].parameters(), strict=True))


class Unfrozen(Recorded):
    """A layer is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.network.layers[0].requires_grad_(self.current_epoch > 0)


class Weighted(Recorded):
    """Factors in a dictionary, in an object and among hyper-parameters, of which a hook changes one in each epoch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.factors = {"of": {"loss": 1.0}}
        self.settings = SimpleNamespace(factor=1.0)
        self.unread: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.factors["of"]["loss"] = 0.5
        if self.current_epoch == 2:
            self.settings.factor = 0.25

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.unread.append(float(outputs["loss"]))  # no setting of the step's

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        factor = self.factors["of"]["loss"] * self.settings.factor
        return factor * F.cross_entropy(self(batch[0]), batch[1])


class Replaced(Recorded):
    """Parameters and a buffer with other memory, or other ones, from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        layers = self.network.layers
        if self.current_epoch == 1:
            layers[0].weight.data = layers[0].weight.data * 0.5
            layers[1].running_mean = layers[1].running_mean + 1


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
@pytest.mark.parametrize("module", [Unfrozen, Weighted, Replaced])
def test_what_hooks_change_besides_numbers_is_recorded_anew(module: Any, formulation: str) -> None:
    fused, _ = fit(module, STILL[:2], formulation)
    assert fused.fusion_facts.chosen["training_step"] == formulation
    for number, variant in enumerate(STILL[:2]):
        L.seed_everything(1, verbose=False)
        alone = module(**variant)
        trainer().fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9


class Cycled(Recorded):
    """Momentum changes at every step, which no capture of the optimizers' steps holds for."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams["lr"], total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_captures_that_never_hold_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal captures
        captures += 1
        return captured(*args, **options)

    monkeypatch.setattr(replayed_steps, "captured", counted)
    fused, _ = fit(Cycled, STILL[:2], "branches", {"max_epochs": 5})
    assert captures == 5  # of gradients alone, with the optimizers, alone, with the optimizers, alone
    for number, variant in enumerate(STILL[:2]):
        L.seed_everything(1, verbose=False)
        alone = Cycled(**variant)
        trainer(max_epochs=5).fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9


def test_a_capture_does_not_hold_for_parameters_that_are_added() -> None:
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    replayed = ReplayedOptimizers([optimizer], torch.device("cpu"))
    with replayed.joining():
        pass
    assert replayed.before_joined()
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.2})
    assert not replayed.before_joined()
    with replayed.joining():
        pass
    assert replayed.before_joined()


def test_what_could_not_be_recorded_left_the_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where a recording is tried first and each variant's own step is its substitute."""
    monkeypatch.setattr(StepWays, "is_replayed", lambda _, hook: hook == "training_step")
    fused, _ = fit(Writes, STILL[:2], "auto", {"max_epochs": 1})
    for number, variant in enumerate(STILL[:2]):
        L.seed_everything(1, verbose=False)
        alone = Writes(**variant)
        trainer(max_epochs=1).fit(alone, loader(), loader(shuffle=False))
        assert difference(alone, fused.variants[number]) <= 1e-9
