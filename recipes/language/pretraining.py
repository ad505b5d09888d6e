"""BERT's pre-training: words that were masked, and whether two segments follow each other.

Shapes: N sequences, S tokens, P masked positions, V words.
"""

from typing import Any, Literal

import lightning as L
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from .bert import BertEncoder, BertShape, MaskedWordsHead, NextSentenceHead, bert_shape
from .hugging_face import load_weights, read_shape
from .seal import sealed_vocabulary
from .training import check_training, make_training

Batch = dict[str, Tensor]
IGNORED = -100


class BertPretraining(L.LightningModule):
    """Masked-word and next-sentence training of an encoder.

    Every sequence counts alike: its masked words are averaged first, then the sequences. So a batch that a pipeline
    divides has the loss of the whole.
    """

    def __init__(
        self,
        size: str = "small",
        vocabulary: str | None = None,
        vocabulary_size: int | None = None,
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
    ) -> None:
        super().__init__()
        check_training(lr=lr, weight_decay=weight_decay, warmup_steps=warmup_steps, lr_decay=lr_decay)
        self.save_hyperparameters()
        words, self.seal = sealed_vocabulary(vocabulary, vocabulary_size)
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
        self.masked_words = MaskedWordsHead(shape, self.encoder.embeddings.words)
        self.next_sentence = NextSentenceHead(shape)
        self.word_accuracy = MulticlassAccuracy(shape.vocabulary, average="micro", ignore_index=IGNORED)
        self.order_accuracy = MulticlassAccuracy(2, average="micro")

    @override
    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x_NSH = self.encoder(batch["input_ids"], batch["input_mask"], batch["segment_ids"])
        return self.masked_words(x_NSH, batch["masked_lm_positions"]), self.next_sentence(x_NSH)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        words_NPV, order_N2 = self(batch)
        word_loss, order_loss = self._losses(words_NPV, order_N2, batch)
        self.log("train_loss", word_loss + order_loss, prog_bar=True)
        self.log("train_mlm_loss", word_loss)
        return word_loss + order_loss

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    @override
    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    @override
    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        words_NPV, order_N2 = self(batch)
        return {"masked_words": words_NPV.argmax(-1), "next_sentence": order_N2.softmax(-1)}

    def _evaluate(self, batch: Batch, stage: Literal["val", "test"]) -> None:
        words_NPV, order_N2 = self(batch)
        word_loss, order_loss = self._losses(words_NPV, order_N2, batch)
        self.word_accuracy(words_NPV.flatten(0, 1), masked_labels(batch).flatten())
        self.order_accuracy(order_N2, batch["next_sentence_labels"])
        self.log(f"{stage}_loss", word_loss + order_loss, prog_bar=True, sync_dist=True)
        self.log(f"{stage}_mlm_loss", word_loss, sync_dist=True)
        self.log(f"{stage}_mlm_acc", self.word_accuracy, prog_bar=True)
        self.log(f"{stage}_nsp_acc", self.order_accuracy)

    def _losses(self, words_NPV: Tensor, order_N2: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        labels_NP = masked_labels(batch)
        losses_NP = F.cross_entropy(
            words_NPV.flatten(0, 1), labels_NP.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(labels_NP)
        masked_N = (labels_NP != IGNORED).sum(1).clamp(min=1)
        return (losses_NP.sum(1) / masked_N).mean(), F.cross_entropy(order_N2, batch["next_sentence_labels"])

    @override
    def configure_optimizers(self) -> Any:
        h = self.hparams
        return make_training(
            self, lr=h["lr"], weight_decay=h["weight_decay"], warmup_steps=h["warmup_steps"], lr_decay=h["lr_decay"]
        )


def masked_labels(batch: Batch) -> Tensor:
    """The words to be found. Rows with fewer masked positions are filled with position 0, where no word is masked."""
    return batch["masked_lm_ids"].masked_fill(batch["masked_lm_positions"] == 0, IGNORED)
