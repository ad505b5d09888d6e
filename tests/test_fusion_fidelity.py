"""What users write around a step does for each variant what it does in a run of its own."""

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.wrappers import ClasswiseWrapper

from pl_pipe.callbacks import SuccessiveHalving
from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion.step_ways import StepWays
from tests.fused_modules import CLASSES, Classifier, difference, loader, trainer
from tests.test_fusion_replay import STILL, Recorded

FORMULATIONS = ["array", "model array", "one by one", "branches", "captured array"]


def check(
    module: Any, variants: Any, formulation: str = "auto", *, seeds: Any = None, options: Any = None, data: Any = None
) -> FusionStrategy:
    """Variants equal separate runs; `data` makes the loader of training."""
    make = data or (lambda: loader(seed=5))
    options = options or (dict)
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(variants, formulation=formulation, seeds=seeds)
    running = trainer(strategy=fused, **options())
    running.fit(module(), make(), loader(shuffle=False, seed=6))
    for number, variant in enumerate(variants):
        L.seed_everything(1 if seeds is None else seeds[number], verbose=False)
        alone, plain = module(**variant), trainer(**options())
        plain.fit(alone, make(), loader(shuffle=False, seed=6))
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        for name, value in plain.callback_metrics.items():
            assert abs(running.callback_metrics[f"{name}/variant_{number}"] - value) <= 1e-9, name
    return fused


# ---- the trainer's optimizers and schedulers


class WarmsUp(Recorded):
    """By hand, through the trainer, and through `self.optimizers()`."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        rate = self.hparams["lr"] * min(1.0, (self.global_step + 1) / 10)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def on_train_batch_end(self, *_: Any) -> None:
        own: Any = self.optimizers()
        assert own.optimizer.param_groups[0]["lr"] == own.param_groups[0]["lr"]
        assert own.optimizer is self.optimizers(use_pl_optimizer=False)
        assert len(self.trainer.optimizers) == len(self.trainer.lr_scheduler_configs) == 1
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_hooks_find_their_own_optimizer_at_the_trainer(formulation: str) -> None:
    check(WarmsUp, STILL, formulation)


class ReadsRates(Recorded):
    """A loss that depends on the rate as the trainer has it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        of_schedule = self.trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0]
        return (1 + rate + of_schedule) * F.cross_entropy(self(batch[0]), batch[1])


def test_steps_find_their_own_optimizer_at_the_trainer() -> None:
    fused = check(ReadsRates, STILL)
    facts = fused.fusion_facts
    assert facts is not None
    assert facts.chosen["training_step"] != "array", "one module's Python would have read the first one's"


class OneCycle(Recorded):
    """Asks how many steps there will be, for which Lightning has a loader made; that draws."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.hparams["lr"], total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("formulation", ["array", "one by one", "branches"])
def test_a_loader_that_is_made_for_its_length_draws_once_for_all(formulation: str) -> None:
    variants = [{"lr": 0.1, "dropout": 0.2}, {"lr": 0.03, "dropout": 0.2}]
    check(OneCycle, variants, formulation, data=loader)


# ---- replays


def test_batches_of_other_names_are_other_steps() -> None:
    class Named(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch["x"]), batch["label"] if "label" in batch else batch["pseudo"])
            return loss if "label" in batch else 0.1 * loss

    def batches() -> list[Any]:
        pairs = list(loader(shuffle=False))[:6]
        return [{"x": x, ("pseudo" if place % 2 else "label"): y} for place, (x, y) in enumerate(pairs)]

    check(Named, STILL[:2], "branches", data=lambda: DataLoader(batches(), batch_size=None))


def test_inputs_in_another_order_are_not_exchanged() -> None:
    class Pairs(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch["a"]) - 0.5 * self(batch["b"]), batch["y"])

    def batches() -> list[Any]:
        found = []
        for place, (x, y) in enumerate(list(loader(shuffle=False))[:6]):
            pair = {"a": x, "b": 2 * x.flip(0), "y": y}
            found.append(pair if place % 2 else dict(reversed(pair.items())))
        return found

    check(Pairs, STILL[:2], "branches", data=lambda: DataLoader(batches(), batch_size=None))


@pytest.mark.parametrize(
    "formulation", ["branches", "captured array", pytest.param("compiled branches", marks=pytest.mark.slow)]
)
def test_a_tensor_that_a_hook_fills_is_seen(formulation: str) -> None:
    class Annealed(Recorded):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.beta = torch.tensor(0.0, dtype=torch.float64)
            self.unread = torch.zeros(())

        def on_train_epoch_start(self) -> None:
            self.beta.fill_(self.current_epoch / 2)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.unread += 1  # no setting of the step's

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (1 + self.beta) * F.cross_entropy(self(batch[0]), batch[1])

    fused = check(Annealed, STILL[:2], formulation)
    assert fused.fusion_facts is not None
    assert fused.fusion_facts.chosen["training_step"] == formulation


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_parameters_that_a_hook_gives_other_memory_are_read_there(formulation: str) -> None:
    class Clamped(Recorded):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch:
                weight = self.network.layers[0].weight
                weight.data = weight.data.clamp(-0.1, 0.1)

    check(Clamped, STILL[:2], formulation)


def test_a_collection_that_a_recording_cannot_answer_for_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients would be added up, and metrics be told twice, if what follows went on from there."""
    monkeypatch.setattr(StepWays, "is_replayed", lambda self, hook: hook == "training_step")

    class Classwise(Recorded):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.each = MetricCollection({"acc": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None))})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self(batch[0])
            loss = F.cross_entropy(logits, batch[1])
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            self.log_dict(self.each(logits, batch[1]), on_step=False, on_epoch=True)
            return loss

    check(Classwise, STILL[:2])


def test_what_fails_after_a_recording_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from pl_pipe.strategies.fusion.replayed_steps import ReplayedSteps

    def fails(*_: Any) -> Any:
        raise RuntimeError("says nothing")

    monkeypatch.setattr(StepWays, "is_replayed", lambda self, hook: hook == "training_step")
    monkeypatch.setattr(ReplayedSteps, "_play", fails)
    check(Recorded, STILL[:2])


def test_a_lambda_between_backward_and_update_is_heard() -> None:
    def nothing_of(trainer: Any, *_: Any) -> None:
        for module in getattr(trainer.strategy, "variants", None) or [trainer.lightning_module]:
            for parameter in module.parameters():
                parameter.grad.mul_(0.0)

    check(
        Recorded, STILL[:2], "branches",
        options=lambda: {"callbacks": [LambdaCallback(on_before_optimizer_step=nothing_of)]},
    )  # fmt: skip


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_adam_that_is_begun_anew(formulation: str) -> None:
    class Restarts(Recorded):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                self.optimizers().state.clear()  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])

    check(Restarts, STILL[:2], formulation, options=lambda: {"max_epochs": 4})


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_accumulation_that_comes_and_goes(formulation: str) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 1, 2: 3, 4: 1})], "max_epochs": 6}

    check(Recorded, STILL[:2], formulation, options=options)


# ---- before, between and after arrays


def test_the_check_before_training_draws_nothing_of_a_seed_of_its_own() -> None:
    class Noisy(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", F.cross_entropy(self(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1]))

    options = {"num_sanity_val_steps": 2}
    check(Noisy, [{}, {}, {}], "one by one", seeds=[1, 2, 3], options=lambda: dict(options))


def test_every_array_begins_with_the_trainers_own_settings() -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})], "max_epochs": 2, "max_time": "00:00:10:00"}

    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(STILL[:2], max_array=1)
    trainer(strategy=fused, **options()).fit(Recorded(), loader(seed=5), loader(shuffle=False, seed=6))
    for number, variant in enumerate(STILL[:2]):
        L.seed_everything(1, verbose=False)
        alone = Recorded(**variant)
        trainer(**options()).fit(alone, loader(seed=5), loader(shuffle=False, seed=6))
        assert difference(alone, fused.variants[number]) <= 1e-9, number


def test_who_left_one_fit_is_noted_in_the_next() -> None:
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(STILL, monitor="val_loss")
    halving = SuccessiveHalving(monitor="val_loss", mode="min", factor=3)
    running = trainer(strategy=fused, callbacks=[halving])
    module = Classifier()
    running.fit(module, loader(seed=5), loader(shuffle=False, seed=6))
    assert fused.leaderboard is not None
    assert len({row.steps for row in fused.leaderboard.rows}) > 1
    running.callbacks.remove(halving)  # type: ignore[attr-defined]
    running.fit_loop.max_epochs = 5
    running.fit(module, loader(seed=5), loader(shuffle=False, seed=6))
    assert len({row.status for row in fused.leaderboard.rows}) == 1
    assert len({row.steps for row in fused.leaderboard.rows}) == 1
