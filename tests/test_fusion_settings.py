"""What differs between variants, wherever it stands and whenever it was set: no step computes with another's.

Every module reads a number that is each variant's own. Whatever is chosen for it equals separate runs; a formulation
that cannot read it refuses.
"""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import CLASSES, difference, loader, trainer

BETAS = (1.0, 0.2, 0.5)


class Weighted(L.LightningModule):
    """The loss is multiplied with what `weight` says."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, CLASSES))
        self.prepare_more(beta)

    def prepare_more(self, beta: float) -> None: ...

    def weight(self) -> Any:
        return 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight() * self.loss(batch)  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


# ---- set in __init__


class OfAPart(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net.scale = beta  # type: ignore[assignment]

    def weight(self) -> Any:
        return self.net.scale


class OfADropout(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.drop = nn.Dropout(beta / 2)

    def weight(self) -> Any:
        return 1.0 - self.drop.p


class Body(nn.Module):
    def __init__(self, net: nn.Module, beta: float) -> None:
        super().__init__()
        self.net, self.drop = net, nn.Dropout(beta / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (1 - self.drop.p)  # type: ignore[no-any-return]


class OfAPartByAPart(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net = Body(self.net, beta)  # type: ignore[assignment]


class OfALoss(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.criterion = nn.CrossEntropyLoss(label_smoothing=beta / 2)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], label_smoothing=self.criterion.label_smoothing)


class OfSomeAlone(Weighted):
    def prepare_more(self, beta: float) -> None:
        if beta != 1.0:
            self.scale = beta

    def weight(self) -> Any:
        return getattr(self, "scale", 1.0)


class ThereOrNot(Weighted):
    def prepare_more(self, beta: float) -> None:
        if beta != 1.0:
            self.is_light = True

    def weight(self) -> Any:
        return 0.2 if hasattr(self, "is_light") else 1.0


class ByAHook(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net[0].register_forward_hook(lambda _, __, out: out * beta)


class ByAHookBefore(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net[0].register_forward_pre_hook(lambda _, given: (given[0] * beta,))


# ---- hyper-parameters


class AsADictionary(Weighted):
    def weight(self) -> Any:
        return dict(self.hparams)["beta"]


class AsArguments(Weighted):
    def weight(self) -> Any:
        return (lambda beta: beta)(**self.hparams)


class Unpacked(Weighted):
    def weight(self) -> Any:
        return {**self.hparams}["beta"]


class Copied(Weighted):
    def weight(self) -> Any:
        return self.hparams.copy()["beta"]


class Initial(Weighted):
    def weight(self) -> Any:
        return self.hparams_initial["beta"]


class SetByAHook(Weighted):
    def on_train_epoch_start(self) -> None:
        self.hparams["gamma"] = 1.0 if self.current_epoch == 0 else self.hparams["beta"]

    def weight(self) -> Any:
        return self.hparams["gamma"]


# ---- set by hooks


class Annealed(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.kl = 0.0

    def on_train_epoch_start(self) -> None:
        self.kl = min(1.0, (self.current_epoch + 1) * self.hparams["beta"])

    def weight(self) -> Any:
        return self.kl


class AfterValidation(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.factor = 1.0

    def on_validation_epoch_end(self) -> None:
        self.factor *= self.hparams["beta"]

    def weight(self) -> Any:
        return self.factor


class WithOptimizer(Weighted):
    def configure_optimizers(self) -> Any:
        self.used = torch.optim.SGD(self.parameters(), 0.1 * self.hparams["beta"])
        return self.used

    def weight(self) -> Any:
        return 10 * self.used.param_groups[0]["lr"]


class EveryBatch(Weighted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net.scale = self.hparams["beta"] / (1 + batch_idx)

    def weight(self) -> Any:
        return self.net.scale


class InADictionary(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.settings = {"scale": 1.0}

    def on_train_epoch_start(self) -> None:
        self.settings["scale"] = self.hparams["beta"]

    def weight(self) -> Any:
        return self.settings["scale"]


class Momentum(Weighted):
    def on_train_epoch_start(self) -> None:
        self.net[1].momentum = self.hparams["beta"]


class Smoothed(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.criterion = nn.CrossEntropyLoss()

    def on_train_start(self) -> None:
        self.criterion.label_smoothing = self.hparams["beta"] / 2

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])  # type: ignore[no-any-return]


class MadeLater(Weighted):
    def on_fit_start(self) -> None:
        self.criterion = nn.CrossEntropyLoss(label_smoothing=self.hparams["beta"] / 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self.net(batch[0]), batch[1])  # type: ignore[no-any-return]


class ATensor(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.scale = torch.ones(())

    def on_train_epoch_start(self) -> None:
        self.scale.fill_(self.hparams["beta"] * (1 + self.current_epoch))

    def weight(self) -> Any:
        return self.scale


class OfTheTrainer(Weighted):
    """Its own last loss, in a hook and in the step."""

    def on_train_epoch_start(self) -> None:
        with torch.no_grad():
            self.net[0].bias.add_(0.1 * float(self.trainer.callback_metrics.get("val_loss", 0.0)))

    def weight(self) -> Any:
        return 1 + self.hparams["beta"] * float(self.trainer.callback_metrics.get("val_loss", 0.0))


class ValidatedOtherwise(Weighted):
    def on_validation_epoch_start(self) -> None:
        self.factor = self.hparams["beta"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.factor * self.loss(batch))


# ---- in places of which one does not think


class Doubled(nn.Module):
    """A property stands over what is stored."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        vars(self)["scale"] = beta

    @property
    def scale(self) -> float:
        return 2 * vars(self)["scale"]  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class OverAValue(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net.append(Doubled(beta))


class Usually(nn.Module):
    scale = 1.0

    def __init__(self, beta: float) -> None:
        super().__init__()
        if beta != 1.0:
            self.scale = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class OfTheClass(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.net.append(Usually(beta))


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class InPlace(Weighted):
    """A hook writes to what steps then read."""

    def prepare_more(self, beta: float) -> None:
        self.array = np.ones(2)
        self.slots = Slots()
        self.deep: Any = {"a": {"b": [{"c": {"d": 1.0}}]}}
        self.net.settings = {"scale": 1.0}  # type: ignore[assignment]

    def on_train_epoch_start(self) -> None:
        self.write(self.hparams["beta"] * (1 + self.current_epoch))

    def write(self, value: float) -> None: ...


class OfNumPy(InPlace):
    def write(self, value: float) -> None:
        self.array[0] = value

    def weight(self) -> Any:
        return float(self.array[0])


class OfSlots(InPlace):
    def write(self, value: float) -> None:
        self.slots.scale = value

    def weight(self) -> Any:
        return self.slots.scale


class DeepDown(InPlace):
    def write(self, value: float) -> None:
        self.deep["a"]["b"][0]["c"]["d"] = value

    def weight(self) -> Any:
        return self.deep["a"]["b"][0]["c"]["d"]


class OnTorchs(InPlace):
    def write(self, value: float) -> None:
        self.net.settings["scale"] = value  # type: ignore[index,operator]

    def weight(self) -> Any:
        return self.net.settings["scale"]  # type: ignore[index]


class ByDefault(Weighted):
    def weight(self) -> Any:
        return self.hparams.setdefault("beta", 1.0)


class AfterSteps(Annealed):
    def on_train_epoch_start(self) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def set_weight(*_: Any) -> None:
            self.kl = self.kl + self.hparams["beta"]

        optimizer.register_step_post_hook(set_weight)
        return optimizer


class BySchedule(Annealed):
    def on_train_epoch_start(self) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()

        def rate(epoch: int) -> float:
            self.kl = self.hparams["beta"] * (1 + epoch)
            return 1.0

        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, rate)]


class Attention(Weighted):
    """Attention that differs in dropout runs once a variant; masks after it go by how its results lie in memory."""

    def prepare_more(self, beta: float) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=beta / 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def loss(self, batch: Any) -> Tensor:
        x = self.encoder(batch[0].unsqueeze(1).repeat(1, 3, 1))
        return F.cross_entropy(self.net(x.mean(1)), batch[1])


CASES: list[Callable[..., Weighted]] = [
    *(OfAPart, OfADropout, OfAPartByAPart, OfALoss, OfSomeAlone, ThereOrNot, ByAHook, ByAHookBefore),
    *(AsADictionary, AsArguments, Unpacked, Copied, Initial, SetByAHook),
    *(Annealed, AfterValidation, WithOptimizer, EveryBatch, InADictionary, Momentum, Smoothed, MadeLater, ATensor),
    *(OfTheTrainer, ValidatedOtherwise),
    *(OverAValue, OfTheClass, OfNumPy, OfSlots, DeepDown, OnTorchs, ByDefault, AfterSteps, BySchedule),
    Attention,
]


def of_class_made_for_it(beta: float = 1.0) -> Weighted:
    class Local(Weighted):
        def weight(self) -> Any:
            return beta

    return Local(beta)


def fit(model: L.LightningModule, **options: Any) -> L.Trainer:
    running = trainer(max_epochs=3, **options)
    running.fit(model, loader(shuffle=False), loader(shuffle=False, seed=6))
    return running


def check(build: Callable[..., Weighted], formulation: str) -> str:
    """-> How training steps were computed."""
    L.seed_everything(1, verbose=False)
    factory = build if build is of_class_made_for_it else None
    fused = FusionStrategy([{"beta": beta} for beta in BETAS], formulation=formulation, factory=factory)
    fit(build(), strategy=fused)
    for number, beta in enumerate(BETAS):
        L.seed_everything(1, verbose=False)
        alone = build(beta=beta)
        plain = fit(alone)
        assert difference(alone, fused.variants[number]) <= 1e-9, number
        (row,) = [row for row in fused.leaderboard.rows if row.number == number]
        assert row.last["val_loss"] == pytest.approx(float(plain.callback_metrics["val_loss"]), abs=1e-9)
    assert fused.fusion_facts is not None
    return fused.fusion_facts.chosen["training_step"]


@pytest.mark.parametrize("formulation", ["auto", "array", "model array", "branches", "captured array"])
@pytest.mark.parametrize("build", CASES)
def test_each_variant_computes_with_its_own(build: Callable[..., Weighted], formulation: str) -> None:
    with nullcontext() if formulation == "auto" else suppress(FusionError):
        check(build, formulation)


@pytest.mark.parametrize("build", [Momentum, Attention, OverAValue, OfTheClass])
def test_parts_that_differ_run_once_a_variant_in_the_array(build: Callable[..., Weighted]) -> None:
    assert check(build, "array") == "array"


def test_a_tensor_that_differs_later_is_an_array() -> None:
    assert check(ATensor, "array") == "array"


@pytest.mark.parametrize("formulation", ["auto", "array", "model array"])
def test_classes_of_one_name_that_know_other_numbers_are_other_architectures(formulation: str) -> None:
    check(of_class_made_for_it, formulation)


def test_a_class_made_anew_by_each_call_is_one_architecture() -> None:
    def build(beta: float = 1.0) -> Weighted:
        class Local(Weighted):
            def __init__(self, beta: float) -> None:
                super().__init__(beta)

            def weight(self) -> Any:
                return 2.0

        return Local(beta)

    fused = FusionStrategy([{"beta": beta} for beta in BETAS], factory=build, formulation="array")
    fit(build(), strategy=fused)
    assert len(fused._arrays) == 1


class ByACallback(L.Callback):
    """Knows the first variant's module alone, or all of them."""

    def __init__(self, *, is_for_all: bool) -> None:
        self._is_for_all = is_for_all

    def on_train_epoch_start(self, running: L.Trainer, module: L.LightningModule) -> None:
        modules = getattr(running.strategy, "variants", [module])
        for one in modules if self._is_for_all else [module]:
            one.kl = one.hparams["beta"] * (1 + running.current_epoch) if self._is_for_all else 0.5


class SetByCallbacks(Weighted):
    def prepare_more(self, beta: float) -> None:
        self.kl = 1.0

    def weight(self) -> Any:
        return self.kl


def test_functions_of_a_lambda_callback_are_a_users() -> None:
    def set_weights(running: L.Trainer, module: L.LightningModule) -> None:
        for one in getattr(running.strategy, "variants", [module]):
            one.kl = one.hparams["beta"]

    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"beta": beta} for beta in BETAS])
    fit(SetByCallbacks(), strategy=fused, callbacks=[LambdaCallback(on_train_epoch_start=set_weights)])
    for number, beta in enumerate(BETAS):
        L.seed_everything(1, verbose=False)
        alone = SetByCallbacks(beta)
        fit(alone, callbacks=[LambdaCallback(on_train_epoch_start=set_weights)])
        assert difference(alone, fused.variants[number]) <= 1e-9, number


@pytest.mark.parametrize("formulation", ["auto", "model array", "one by one"])
@pytest.mark.parametrize("is_for_all", [True, False])
def test_callbacks_set_what_they_set(is_for_all: bool, formulation: str) -> None:
    """Of the first module alone, where they set it there: the same, however steps are computed."""
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy([{"beta": beta} for beta in BETAS], formulation=formulation)
    fit(SetByCallbacks(), strategy=fused, callbacks=[ByACallback(is_for_all=is_for_all)])
    for number, beta in enumerate(BETAS):
        L.seed_everything(1, verbose=False)
        alone = SetByCallbacks(beta)
        meets = is_for_all or number == 0
        fit(alone, callbacks=[ByACallback(is_for_all=is_for_all)] if meets else [])
        assert difference(alone, fused.variants[number]) <= 1e-9, number


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), Usually(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.layer(x))  # type: ignore[no-any-return]


def test_what_is_refused_once_is_refused_again() -> None:
    """Until the array may be made anew; nobody computes with settings that were looked at and not taken over."""
    runs, variants, x = [0], [Scaled(), Scaled()], torch.randn(4, 3)
    array = VariantArray(variants, runs=lambda: runs[0])
    array(x)
    variants[1].scale.scale = 0.5
    runs[0] += 1
    for _ in range(2):
        with pytest.raises(FusionError, match="the step itself changes settings of scale"), array.fused(renews=False):
            pass
    for out, variant in zip(array(x), variants, strict=True):
        torch.testing.assert_close(out, variant(x))
    variants[1].other = nn.ReLU()  # type: ignore[assignment]
    runs[0] += 1
    for _ in range(2):
        with pytest.raises(FusionError, match="a variant has other modules than when the array was made"):
            array(x)


# ---- the trainer's flow


class SkipsSome(Weighted):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.hparams["beta"] != 1.0 and batch_idx > 2 else None


def test_batches_that_only_some_skip_are_refused() -> None:
    with pytest.raises(FusionError, match=r"on_train_batch_start of some variants returns -1.*max_array=1"):
        fit(SkipsSome(), strategy=FusionStrategy([{"beta": beta} for beta in BETAS]))


class StopsAll(Weighted):
    def on_train_epoch_end(self) -> None:
        self.trainer.should_stop = self.trainer.should_stop or self.hparams["beta"] == 0.2


def test_who_stops_all_is_told(caplog: pytest.LogCaptureFixture) -> None:
    running = fit(StopsAll(), strategy=FusionStrategy([{"beta": beta} for beta in BETAS]))
    assert running.current_epoch == 1
    told = [record.getMessage() for record in caplog.records if "should_stop" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("variant 1 sets trainer.should_stop, which ends the training of all variants")
