"""BERT's encoder and its heads (Devlin et al., 2018), in the published sizes and any other.

    ids, segments ─► embeddings ─► layers[0] ─► … ─► layers[n-1] ─┬► masked_words (its decoder is the word embedding)
                                                                  ├► pooler ─► next_sentence
                                                                  └► span (start and end of an answer)

Shapes: N sequences, S tokens, P masked positions, H hidden units, V words.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .layers import ACTIVATIONS, TransformerLayer, start_small


@dataclass(frozen=True)
class BertShape:
    """How large an encoder is."""

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocabulary: int = 30522
    positions: int = 512
    segments: int = 2
    dropout: float = 0.1
    activation: str = "gelu"
    norm_epsilon: float = 1e-12


SIZES: dict[str, tuple[int, int]] = {"tiny": (2, 128), "small": (4, 512), "medium": (8, 512), "base": (12, 768)}
"""Layers and hidden units; every 64 of them are a head, and the feed-forward network is four times as wide."""


def bert_shape(
    size: str,
    *,
    vocabulary: int,
    positions: int = 512,
    dropout: float = 0.1,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    feed_forward: int | None = None,
) -> BertShape:
    """A published size, with what is given in the place of its own."""
    if size not in SIZES:
        raise ConfigError(f"recipe.size={size} is unknown; choose one of {', '.join(SIZES)}")
    layers = SIZES[size][0] if layers is None else layers
    hidden = SIZES[size][1] if hidden is None else hidden
    heads = max(1, hidden // 64) if heads is None else heads
    feed_forward = 4 * hidden if feed_forward is None else feed_forward
    for name, value in (
        ("layers", layers),
        ("hidden", hidden),
        ("heads", heads),
        ("feed_forward", feed_forward),
        ("vocabulary", vocabulary),
        ("positions", positions),
    ):
        if value < 1:
            raise ConfigError(f"recipe.{name}={value} is too small; the least is 1")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"recipe.dropout={dropout} is no probability below 1; choose 0.1, or 0 for none")
    return BertShape(layers, hidden, heads, feed_forward, vocabulary, positions, dropout=dropout)


class BertEmbeddings(nn.Module):
    """The sum of what a token is, where it stands and which segment it belongs to."""

    position_ids: Tensor

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden)
        self.segments = nn.Embedding(shape.segments, shape.hidden)
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.norm_epsilon)
        self.dropout = nn.Dropout(shape.dropout)
        self.register_buffer("position_ids", torch.arange(shape.positions), persistent=False)

    @override
    def forward(self, ids_NS: Tensor, segments_NS: Tensor) -> Tensor:
        length = ids_NS.shape[1]
        if length > len(self.position_ids):
            raise ConfigError(
                f"sequences have {length} tokens, the encoder has {len(self.position_ids)} positions; "
                f"shorten the sequences or set recipe.positions={length}"
            )
        placed = self.words(ids_NS) + self.segments(segments_NS) + self.positions(self.position_ids[:length])
        embedded: Tensor = self.dropout(self.norm(placed))
        return embedded


class BertEncoder(nn.Module):
    """Embeddings and layers; its output has one vector a token."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        if shape.activation not in ACTIVATIONS:
            raise ConfigError(f"activation {shape.activation} is unknown; choose one of {', '.join(ACTIVATIONS)}")
        self.shape = shape
        self.embeddings = BertEmbeddings(shape)
        self.layers = nn.ModuleList(
            TransformerLayer(
                shape.hidden,
                shape.heads,
                shape.feed_forward,
                dropout=shape.dropout,
                activation=shape.activation,
                norm_epsilon=shape.norm_epsilon,
            )
            for _ in range(shape.layers)
        )
        start_small(self)

    @override
    def forward(self, ids_NS: Tensor, mask_NS: Tensor, segments_NS: Tensor) -> Tensor:
        """`mask_NS` is 1 where a token is, 0 where the sequence is filled up."""
        attend_N11S = mask_NS.bool()[:, None, None, :]
        x_NSH: Tensor = self.embeddings(ids_NS, segments_NS)
        for layer in self.layers:
            x_NSH = layer(x_NSH, attend_N11S)
        return x_NSH


class MaskedWordsHead(nn.Module):
    """Which word stands at each masked position; the decoder's weight is the word embedding's."""

    def __init__(self, shape: BertShape, words: nn.Embedding) -> None:
        super().__init__()
        self.transform = nn.Linear(shape.hidden, shape.hidden)
        self.activation = ACTIVATIONS[shape.activation]()
        self.norm = nn.LayerNorm(shape.hidden, eps=shape.norm_epsilon)
        self.decoder = nn.Linear(shape.hidden, shape.vocabulary)
        start_small(self)
        self.decoder.weight = words.weight

    @override
    def forward(self, x_NSH: Tensor, positions_NP: Tensor) -> Tensor:
        index_NPH = positions_NP.unsqueeze(-1).expand(-1, -1, x_NSH.shape[-1])
        masked_NPH = x_NSH.gather(1, index_NPH)
        logits_NPV: Tensor = self.decoder(self.norm(self.activation(self.transform(masked_NPH))))
        return logits_NPV


class NextSentenceHead(nn.Module):
    """Whether the second segment follows the first (class 0) or is from elsewhere (class 1)."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.pooler = nn.Linear(shape.hidden, shape.hidden)
        self.activation = nn.Tanh()
        self.classifier = nn.Linear(shape.hidden, 2)
        start_small(self)

    @override
    def forward(self, x_NSH: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.activation(self.pooler(x_NSH[:, 0])))
        return logits


class SpanHead(nn.Module):
    """How likely each token is an answer's first, and its last."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.classifier = nn.Linear(shape.hidden, 2)
        start_small(self)

    @override
    def forward(self, x_NSH: Tensor) -> tuple[Tensor, Tensor]:
        starts_NS, ends_NS = self.classifier(x_NSH).unbind(-1)
        return starts_NS, ends_NS
