"""An image classifier as any Lightning user would write it; the strategies must train it as it stands."""

from typing import Any, Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from pl_pipe.errors import ConfigError

from ..optim import LR_POLICIES, OPTIMIZERS, make_optimizer, make_scheduler, training_length
from .networks import build_network

Batch = tuple[Tensor, Tensor]


class ImageClassifier(L.LightningModule):
    """Cross-entropy training of one of the networks in `networks.py`, with top-1 and top-5 accuracy."""

    def __init__(
        self,
        arch: str,
        num_classes: int,
        image_size: int,
        width: float = 1.0,
        dropout: float | None = None,
        optimizer: str = "sgd",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        lr_policy: str = "step",
        warmup_epochs: float = 0.0,
        lr_gamma: float = 0.1,
        lr_step_epochs: int = 30,
        lr_power: float = 2.0,
    ) -> None:
        super().__init__()
        if optimizer not in OPTIMIZERS:
            raise ConfigError(f"recipe.optimizer={optimizer} is unknown; choose one of {', '.join(OPTIMIZERS)}")
        if lr_policy not in LR_POLICIES:
            raise ConfigError(f"recipe.lr_policy={lr_policy} is unknown; choose one of {', '.join(LR_POLICIES)}")
        if lr <= 0 or momentum < 0 or weight_decay < 0 or lr_step_epochs < 1 or warmup_epochs < 0:
            raise ConfigError(
                f"recipe.lr={lr} must be positive, recipe.momentum={momentum}, recipe.weight_decay={weight_decay} and "
                f"recipe.warmup_epochs={warmup_epochs} not negative, recipe.lr_step_epochs={lr_step_epochs} at least 1"
            )
        self.save_hyperparameters()
        self.network = build_network(arch, num_classes=num_classes, image_size=image_size, width=width, dropout=dropout)
        top5 = min(5, num_classes)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")
        self.val_metrics = nn.ModuleDict(
            {
                "acc": MulticlassAccuracy(num_classes, average="micro"),
                "acc_top5": MulticlassAccuracy(num_classes, average="micro", top_k=top5),
            }
        )

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
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
        images = batch[0]
        probabilities = self(images).softmax(dim=1)
        confidence, label = probabilities.max(dim=1)
        return {"label": label, "confidence": confidence, "probabilities": probabilities}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        images, labels = batch
        logits = self(images)
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
        steps_per_epoch, epochs = training_length(self.trainer)
        scheduler = make_scheduler(
            optimizer,
            steps_per_epoch=steps_per_epoch,
            epochs=epochs,
            policy=h["lr_policy"],
            warmup_epochs=h["warmup_epochs"],
            gamma=h["lr_gamma"],
            step_epochs=h["lr_step_epochs"],
            power=h["lr_power"],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
