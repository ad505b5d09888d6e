"""PointNet as any Lightning user would write it; the strategies must train it as it stands."""

from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from pl_pipe.errors import ConfigError

from ..optim import OPTIMIZERS, make_optimizer
from .network import PointNet, distance_from_rotations

Batch = tuple[Tensor, Tensor]


class PointClassifier(L.LightningModule):
    """Cross-entropy training of PointNet, with the accuracy over clouds and the mean over classes."""

    def __init__(
        self,
        num_classes: int,
        width: float = 1.0,
        feature_transform: bool = True,
        regularization: float = 0.001,
        dropout: float = 0.3,
        optimizer: str = "adam",
        lr: float = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        lr_step_epochs: int = 20,
        lr_gamma: float = 0.5,
    ) -> None:
        super().__init__()
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"recipe.optimizer={optimizer} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        _check(width=width, lr=lr, lr_step_epochs=lr_step_epochs, dropout=dropout, regularization=regularization)
        self.save_hyperparameters()
        self.network = PointNet(num_classes, width=width, feature_transform=feature_transform, dropout=dropout)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_metrics = nn.ModuleDict(
            {
                "acc": MulticlassAccuracy(num_classes, average="micro"),
                "class_acc": MulticlassAccuracy(num_classes, average="macro"),
            }
        )

    @override
    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.network(points)[0]
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        points, labels = batch
        logits, transform = self.network(points)
        loss = F.cross_entropy(logits, labels)
        if transform is not None:
            loss = loss + self.hparams["regularization"] * distance_from_rotations(transform)
        self.train_acc(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        probabilities = self(batch[0]).softmax(dim=1)
        confidence, label = probabilities.max(dim=1)
        return {"label": label, "confidence": confidence, "probabilities": probabilities}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        points, labels = batch
        logits = self(points)
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), prog_bar=True, sync_dist=True)
        for name, metric in self.val_metrics.items():
            assert isinstance(metric, Metric)
            metric(logits, labels)
            self.log(f"{stage}_{name}", metric, prog_bar=name == "acc")

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        optimizer = make_optimizer(
            h["optimizer"], self.parameters(), lr=h["lr"], momentum=h["momentum"], weight_decay=h["weight_decay"]
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, h["lr_step_epochs"], h["lr_gamma"])
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def _check(*, width: float, lr: float, lr_step_epochs: int, dropout: float, regularization: float) -> None:
    if width <= 0 or lr <= 0 or lr_step_epochs < 1:
        raise ConfigError(
            f"recipe.width={width} and recipe.lr={lr} must be positive, recipe.lr_step_epochs={lr_step_epochs} "
            f"at least 1"
        )
    if not 0 <= dropout < 1 or regularization < 0:
        raise ConfigError(
            f"recipe.dropout={dropout} must lie between 0 and 1, recipe.regularization={regularization} not below 0"
        )
