"""A way of computing a step that fails in its backward leaves gradients of earlier batches as they were."""

import random
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pl_pipe.errors import FusionError
from pl_pipe.strategies import FusionStrategy
from tests.fused_modules import Classifier, difference, loader, trainer

VARIANTS: list[dict[str, Any]] = [{"lr": 0.1, "seed": 1}, {"lr": 0.05, "seed": 2}, {"lr": 0.2}]


class Hooked(Classifier):
    """In a later batch of each update a hook of the backward draws, which arrays cannot; it changes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if batch_idx % 2:
            loss.register_hook(lambda _: random.random() and None)
        self.log("train_loss", loss)
        return loss


class Failing(Classifier):
    """In a later batch of each update a backward fails, after it has come to some of the weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        if batch_idx % 2:
            first = next(iter(self.parameters()))
            loss = loss + _Draws.apply(first).sum() * 0.0
        return loss


class _Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        random.random()
        return gradient


class Words(L.LightningModule):
    def __init__(self, lr: float = 0.1, kind: str = "sgd") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.words, self.last = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 10)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.last(self.words(batch[0]).mean(1)), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def check(kind: type[L.LightningModule], data: str = "perceptron", batches: int = 4, **settings: Any) -> FusionStrategy:
    options = {"max_epochs": 2, "limit_train_batches": batches, "accumulate_grad_batches": 2}
    L.seed_everything(1, verbose=False)
    fused = FusionStrategy(VARIANTS, **settings)
    trainer(strategy=fused, **options).fit(kind(), loader(data, seed=5))
    for variant, found in zip(VARIANTS, fused.variants, strict=True):
        L.seed_everything(variant.get("seed", 1), verbose=False)
        alone = kind(lr=variant["lr"])  # type: ignore[call-arg]
        trainer(**options).fit(alone, loader(data, seed=5))
        assert difference(alone, found) <= 1e-12
    return fused


@pytest.mark.parametrize("kind", [Hooked, Failing])
@pytest.mark.parametrize("batches", [2, 4, 5])
def test_a_later_batch_of_an_update_is_not_added_twice(kind: type[L.LightningModule], batches: int) -> None:
    fused = check(kind, batches=batches)
    assert fused.fusion_facts is not None
    assert fused.fusion_facts.chosen["training_step"] == "one by one"


@pytest.mark.parametrize("settings", [{}, {"formulation": "array"}, {"formulation": "model array"}])
def test_sparse_gradients_are_added_up(settings: dict[str, Any]) -> None:
    check(Words, "lstm", fuse_except=["words"], **settings)


@pytest.mark.parametrize("formulation", ["branches", "captured array"])
def test_sparse_gradients_are_not_replayed(formulation: str) -> None:
    fused = FusionStrategy(VARIANTS, formulation=formulation, fuse_except=["words"])
    with pytest.raises(FusionError, match=r"shape \[20, 6\] has sparse gradients.*sparse=False"):
        trainer(strategy=fused, max_epochs=1).fit(Words(), loader("lstm"))
