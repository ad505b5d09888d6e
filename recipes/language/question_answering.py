"""BERT fine-tuned to mark the answer of a question in a paragraph, or to say that there is none (SQuAD 2.0)."""

from typing import Any, Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric
from typing_extensions import override

from .bert import BertEncoder, BertShape, SpanHead, bert_shape
from .hugging_face import load_weights, read_shape
from .seal import sealed_vocabulary
from .training import check_training, make_training

Batch = dict[str, Tensor]


class BertQuestionAnswering(L.LightningModule):
    """Start and end of an answer; both are token 0 where the window at hand has none."""

    def __init__(
        self,
        size: str = "small",
        vocabulary: str | None = None,
        positions: int = 512,
        layers: int | None = None,
        hidden: int | None = None,
        heads: int | None = None,
        feed_forward: int | None = None,
        dropout: float = 0.1,
        weights: str | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_steps: float = 0.1,
        lr_decay: str = "linear",
        lowercase: bool = True,
    ) -> None:
        super().__init__()
        check_training(lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps, lr_decay=lr_decay)
        self.save_hyperparameters()
        words, self.seal = sealed_vocabulary(vocabulary, None, lowercase=lowercase)
        shape = bert_shape(
            size, vocabulary=words, positions=positions, dropout=dropout,
            layers=layers, hidden=hidden, heads=heads, feed_forward=feed_forward,
        )  # fmt: skip
        shape = shape if weights is None else read_shape(weights, wanted=shape)
        self.build(shape)
        if weights is not None:
            load_weights(self, weights)

    def build(self, shape: BertShape) -> None:
        self.encoder = BertEncoder(shape)
        self.span = SpanHead(shape)
        self.exact_spans = MeanMetric()

    @override
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the start and of the end, one a token."""
        spans: tuple[Tensor, Tensor] = self.span(
            self.encoder(batch["input_ids"], batch["input_mask"], batch["segment_ids"])
        )
        return spans

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        starts_NS, ends_NS = self(batch)
        loss = self._loss(starts_NS, ends_NS, batch)
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
        starts_NS, ends_NS = self(batch)
        return {"window": batch["window"], "start": starts_NS, "end": ends_NS}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        starts_NS, ends_NS = self(batch)
        right_N = (starts_NS.argmax(1) == batch["start"]) & (ends_NS.argmax(1) == batch["end"])
        self.exact_spans(right_N.float())
        self.log(f"{stage}_loss", self._loss(starts_NS, ends_NS, batch), prog_bar=True, sync_dist=True)
        self.log(f"{stage}_exact_spans", self.exact_spans, prog_bar=True)

    def _loss(self, starts_NS: Tensor, ends_NS: Tensor, batch: Batch) -> Tensor:
        return (F.cross_entropy(starts_NS, batch["start"]) + F.cross_entropy(ends_NS, batch["end"])) / 2

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        return make_training(
            self, lr=h["lr"], weight_decay=h["weight_decay"], warmup_steps=h["warmup_steps"], lr_decay=h["lr_decay"]
        )
