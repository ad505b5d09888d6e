"""GNMT as a LightningModule: label-smoothed training by Adam; the strategies must train it as it stands."""

from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from pl_pipe.errors import ConfigError

from ..optim import polynomial_lr_factor, training_length
from .gnmt import Gnmt
from .learning_rate import LR_POLICIES, gnmt_lr_factor
from .special_ids import PAD

Batch = tuple[Tensor, Tensor, Tensor]
"""Source tokens, their numbers, and target tokens from `BEGIN` to `END`; sentences come first in all three."""


class Translator(L.LightningModule):
    """Trains `Gnmt`. The loss is a sum over a sentence's tokens and a mean over sentences, as the original's."""

    def __init__(
        self,
        vocabulary_size: int,
        encoder_layers: int = 4,
        decoder_layers: int = 4,
        hidden_size: int = 1024,
        dropout: float = 0.2,
        share_embedding: bool = False,
        label_smoothing: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        lr_policy: str = "gnmt",
        warmup_steps: int = 200,
        decay_from: float = 2 / 3,
        decay_times: int = 4,
        decay_factor: float = 0.5,
        lr_power: float = 2.0,
    ) -> None:
        super().__init__()
        if encoder_layers < 2 or decoder_layers < 2 or hidden_size < 1 or vocabulary_size < 5:
            raise ConfigError(
                f"recipe.encoder_layers={encoder_layers} and recipe.decoder_layers={decoder_layers} must be at least "
                f"2, recipe.hidden_size={hidden_size} at least 1, recipe.vocabulary_size={vocabulary_size} at least 5"
            )
        if not (0 <= dropout < 1 and 0 <= label_smoothing < 1 and lr > 0 and 0 <= decay_from <= 1):
            raise ConfigError(
                f"recipe.dropout={dropout} and recipe.label_smoothing={label_smoothing} must be from 0 to below 1, "
                f"recipe.lr={lr} positive, recipe.decay_from={decay_from} from 0 to 1"
            )
        if warmup_steps < 0 or decay_times < 0 or weight_decay < 0 or decay_factor <= 0 or lr_power <= 0:
            raise ConfigError(
                f"recipe.warmup_steps={warmup_steps}, recipe.decay_times={decay_times} and recipe.weight_decay="
                f"{weight_decay} must not be negative, recipe.decay_factor={decay_factor} and recipe.lr_power="
                f"{lr_power} positive"
            )
        if lr_policy not in LR_POLICIES:
            raise ConfigError(f"recipe.lr_policy={lr_policy} is unknown; choose one of {', '.join(LR_POLICIES)}")
        self.save_hyperparameters()
        self.network = Gnmt(
            vocabulary_size,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            hidden_size=hidden_size,
            dropout=dropout,
            share_embedding=share_embedding,
        )
        self.token_loss = MeanMetric()
        self.token_accuracy = MeanMetric()

    @override
    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.network(source, lengths, target)
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        source, lengths, target = batch
        loss = self._loss(self(source, lengths, target[:, :-1]), target[:, 1:])
        self.log("train_loss", loss, prog_bar=True, batch_size=len(source))
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """How probable the model finds each translation; `pl-pipe evaluate` makes its own."""
        source, lengths, target = batch
        losses = self._token_losses(self(source, lengths, target[:, :-1]), target[:, 1:])
        return {"log_probability": -losses.sum(dim=1), "tokens": (target[:, 1:] != PAD).sum(dim=1)}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        source, lengths, target = batch
        labels = target[:, 1:]
        logits = self(source, lengths, target[:, :-1])
        words = labels != PAD
        self.token_loss.update(self._token_losses(logits, labels), weight=words)
        self.token_accuracy.update((logits.argmax(dim=2) == labels).float(), weight=words)
        self.log(f"{stage}_loss", self._loss(logits, labels), sync_dist=True, batch_size=len(source))
        self.log(f"{stage}_token_loss", self.token_loss, prog_bar=True)
        self.log(f"{stage}_token_acc", self.token_accuracy, prog_bar=True)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Divided by sentences, not by tokens: then the parts of a batch add up to it, whatever their lengths."""
        smoothing = self.hparams["label_smoothing"]
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum"
        )
        return total / len(labels)

    def _token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Plain negative log-likelihoods, 0 for padding."""
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD, reduction="none")

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        optimizer = torch.optim.Adam(self.parameters(), lr=h["lr"], weight_decay=h["weight_decay"])
        steps_per_epoch, epochs = training_length(self.trainer)

        def factor(step: int) -> float:
            if h["lr_policy"] == "polynomial":
                return polynomial_lr_factor(step // steps_per_epoch, epochs=epochs, power=h["lr_power"])
            return gnmt_lr_factor(
                step,
                total_steps=round(epochs * steps_per_epoch),
                warmup_steps=h["warmup_steps"],
                decay_from=h["decay_from"],
                decay_times=h["decay_times"],
                decay_factor=h["decay_factor"],
            )

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
