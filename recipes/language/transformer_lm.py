"""A causal language model: the next token from those before it. The fusion experiments' has 2 layers of width 128.

Shapes: N sequences, S tokens, H hidden units, V words.
"""

import math
from typing import Any, Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .layers import TransformerLayer, start_small
from .positions import Positions
from .seal import VocabularySeal
from .training import check_training, make_training

Batch = tuple[Tensor, Tensor]


class TransformerLM(L.LightningModule):
    """Tokens in, distribution of the next one out; perplexity is the exponential of the loss."""

    def __init__(
        self,
        vocabulary_size: int,
        layers: int = 2,
        hidden: int = 128,
        heads: int = 2,
        feed_forward: int | None = None,
        positions: int = 512,
        dropout: float = 0.2,
        tied: bool = False,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: float = 0.05,
        lr_decay: str = "linear",
    ) -> None:
        super().__init__()
        check_training(lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps, lr_decay=lr_decay)
        if min(vocabulary_size, layers, hidden, heads, positions) < 1 or not 0.0 <= dropout < 1.0:
            raise ConfigError(
                f"recipe.vocabulary_size={vocabulary_size}, recipe.layers={layers}, recipe.hidden={hidden}, "
                f"recipe.heads={heads} and recipe.positions={positions} must be at least 1, recipe.dropout={dropout} "
                "from 0 to below 1"
            )
        self.save_hyperparameters()
        self.seal = VocabularySeal(None, vocabulary_size)
        self.embedding = nn.Embedding(vocabulary_size, hidden)
        self.positions = Positions(positions, hidden)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                hidden,
                heads,
                feed_forward or hidden,
                dropout=dropout,
                activation="relu",
                causal=True,
                norm_epsilon=1e-5,
            )
            for _ in range(layers)
        )
        self.decoder = nn.Linear(hidden, vocabulary_size)
        start_small(self)
        if tied:
            self.decoder.weight = self.embedding.weight

    @override
    def forward(self, tokens_NS: Tensor) -> Tensor:
        x_NSH = self.dropout(self.positions(self.embedding(tokens_NS) * math.sqrt(self.embedding.embedding_dim)))
        for layer in self.layers:
            x_NSH = layer(x_NSH)
        logits_NSV: Tensor = self.decoder(x_NSH)
        return logits_NSV

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        return {"next": self(batch[0])[:, -1].softmax(-1)}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        self.log(f"{stage}_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Batch) -> Tensor:
        tokens_NS, next_NS = batch
        return F.cross_entropy(self(tokens_NS).flatten(0, 1), next_NS.flatten())

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        return make_training(
            self, lr=h["lr"], weight_decay=h["weight_decay"], warmup_steps=h["warmup_steps"], lr_decay=h["lr_decay"]
        )
