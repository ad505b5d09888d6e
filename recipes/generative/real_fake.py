"""DCGAN's discriminator alone: tells real images from fakes that the data set brings. One optimizer, any strategy."""

from typing import Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import BinaryAccuracy
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .networks import Discriminator

Batch = tuple[Tensor, Tensor]


class RealFakeClassifier(L.LightningModule):
    """Binary cross-entropy on images that are real (1) or fake (0)."""

    def __init__(
        self, image_size: int, width: float = 1.0, channels: int = 3, lr: float = 2e-4, beta1: float = 0.5
    ) -> None:
        super().__init__()
        check_settings(width=width, lr=lr, beta1=beta1)
        self.save_hyperparameters()
        self.discriminator = Discriminator(image_size, width=width, channels=channels)
        self.train_acc, self.val_acc = BinaryAccuracy(), BinaryAccuracy()

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.discriminator(images)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, is_real = batch
        logits = self(images)
        loss = F.binary_cross_entropy_with_logits(logits, is_real)
        self.train_acc(logits, is_real)
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
        real = self(batch[0]).sigmoid()
        return {"label": real.gt(0.5).long(), "real": real}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        images, is_real = batch
        logits = self(images)
        loss = F.binary_cross_entropy_with_logits(logits, is_real)
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True)
        self.val_acc(logits, is_real)
        self.log(f"{stage}_acc", self.val_acc, prog_bar=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        h = self.hparams
        return torch.optim.Adam(self.parameters(), lr=h["lr"], betas=(h["beta1"], 0.999))


def check_settings(*, width: float, lr: float, beta1: float) -> None:
    """Refuses what neither network can be built or trained with."""
    if width <= 0 or lr <= 0 or not 0 <= beta1 < 1:
        raise ConfigError(
            f"recipe.width={width} and recipe.lr={lr} must be positive, recipe.beta1={beta1} between 0 and 1"
        )
