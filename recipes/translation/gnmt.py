"""GNMT (Wu et al. 2016) as PipeDream trained it: residual LSTMs, a bidirectional first layer, normalised attention.

    source ─ embedding ─ both directions ─ LSTM ─ LSTM+residual … ─────────────┐ memory
    target ─ embedding ─ LSTM ─ query ─ attention ─ context ┬─────────┬─ …      │
                          └────────────────────────────── LSTM ─ LSTM+residual … ─ classifier ─ logits

Every layer is a module of its own, so that a profile shows and a pipeline cuts each. Nothing here reads a tensor's
values: lengths are masks and gathers, never packed sequences.
"""

# N sentences, S source positions, T target positions, H hidden size, V vocabulary

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from .special_ids import PAD

State = list[tuple[Tensor, Tensor]]
"""Hidden and cell state of each decoder layer."""

PUBLISHED_WIDTH = 1024


class BidirectionalLayer(nn.Module):
    """Two LSTMs, the second from each sentence's own end: padding is never read before words."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.rightward = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.leftward = nn.LSTM(hidden_size, hidden_size, batch_first=True)

    @override
    def forward(self, x_NSH: Tensor, lengths_N: Tensor) -> Tensor:
        places = torch.arange(x_NSH.shape[1], device=lengths_N.device)
        ends = lengths_N.unsqueeze(1)
        mirror_NS = torch.where(places < ends, ends - 1 - places, places)
        mirror_NSH = mirror_NS.unsqueeze(2).expand(-1, -1, x_NSH.shape[2])
        right_NSH, _ = self.rightward(x_NSH)
        left_NSH, _ = self.leftward(x_NSH.gather(1, mirror_NSH))
        return torch.cat((right_NSH, left_NSH.gather(1, mirror_NSH)), dim=2)


class Encoder(nn.Module):
    """Both directions, then LSTMs, with residual connections from the third layer on."""

    def __init__(self, num_layers: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.first = BidirectionalLayer(hidden_size)
        sizes = [2 * hidden_size] + [hidden_size] * (num_layers - 2)
        self.layers = nn.ModuleList(nn.LSTM(size, hidden_size, batch_first=True) for size in sizes)
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, embedded_NSH: Tensor, lengths_N: Tensor) -> Tensor:
        x = self.first(self.dropout(embedded_NSH), lengths_N)
        for number, layer in enumerate(self.layers):
            out, _ = layer(self.dropout(x))
            x = out + x if number else out
        memory_NSH: Tensor = x
        return memory_NSH


class NormalisedAttention(nn.Module):
    """Bahdanau's additive attention with a direction and a length: v·g/|v| · tanh(Wq + Uk + b)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.score = AttentionScore(hidden_size)

    @override
    def forward(
        self, query_NTH: Tensor, memory_NSH: Tensor, lengths_N: Tensor, keys_NSH: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The contexts and the weights; `keys` are `self.key(memory)` where they are known already."""
        keys_NSH = self.key(memory_NSH) if keys_NSH is None else keys_NSH
        scores_NTS = self.score(self.query(query_NTH), keys_NSH)
        places = torch.arange(memory_NSH.shape[1], device=lengths_N.device)
        padding_N1S = (places >= lengths_N.unsqueeze(1)).unsqueeze(1)
        weights_NTS = scores_NTS.masked_fill(padding_N1S, torch.finfo(scores_NTS.dtype).min).softmax(dim=2)
        return weights_NTS @ memory_NSH, weights_NTS


class AttentionScore(nn.Module):
    """How well each key answers each query."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.empty(hidden_size))
        self.length = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(hidden_size))

    @override
    def forward(self, query_NTH: Tensor, keys_NSH: Tensor) -> Tensor:
        direction_H = self.direction * (self.length / self.direction.norm())
        sums_NTSH = query_NTH.unsqueeze(2) + (keys_NSH + self.bias).unsqueeze(1)
        scores_NTS: Tensor = torch.tanh(sums_NTSH) @ direction_H
        return scores_NTS


class Decoder(nn.Module):
    """The first layer asks; what the attention answers goes into every layer above it."""

    def __init__(self, num_layers: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.attention = NormalisedAttention(hidden_size)
        self.layers = nn.ModuleList(
            nn.LSTM(2 * hidden_size, hidden_size, batch_first=True) for _ in range(num_layers - 1)
        )
        self.dropout = nn.Dropout(dropout)

    @override
    def forward(self, embedded_NTH: Tensor, memory_NSH: Tensor, lengths_N: Tensor) -> Tensor:
        x, _ = self.first(self.dropout(embedded_NTH))
        context_NTH, _ = self.attention(x, memory_NSH, lengths_N)
        for number, layer in enumerate(self.layers):
            out, _ = layer(torch.cat((self.dropout(x), context_NTH), dim=2))
            x = out + x if number else out
        out_NTH: Tensor = x
        return out_NTH

    def step(
        self, embedded_N1H: Tensor, memory_NSH: Tensor, lengths_N: Tensor, keys_NSH: Tensor, state: State | None
    ) -> tuple[Tensor, Tensor, State]:
        """`forward` for one more position: what it puts out, its attention weights, and the state after it."""
        states = [None] * (1 + len(self.layers)) if state is None else state
        x, after = self.first(embedded_N1H, states[0])
        following: State = [after]
        context_N1H, weights_N1S = self.attention(x, memory_NSH, lengths_N, keys_NSH)
        for number, layer in enumerate(self.layers):
            out, after = layer(torch.cat((x, context_N1H), dim=2), states[number + 1])
            following.append(after)
            x = out + x if number else out
        return x, weights_N1S, following


class Gnmt(nn.Module):
    """Logits of every next target token, given the source and the tokens before."""

    def __init__(
        self,
        vocabulary_size: int,
        *,
        encoder_layers: int,
        decoder_layers: int,
        hidden_size: int,
        dropout: float,
        share_embedding: bool,
    ) -> None:
        super().__init__()
        self.source_embedding = nn.Embedding(vocabulary_size, hidden_size, padding_idx=PAD)
        self.encoder = Encoder(encoder_layers, hidden_size, dropout)
        if share_embedding:
            self.target_embedding = self.source_embedding
        else:
            self.target_embedding = nn.Embedding(vocabulary_size, hidden_size, padding_idx=PAD)
        self.decoder = Decoder(decoder_layers, hidden_size, dropout)
        self.classifier = nn.Linear(hidden_size, vocabulary_size)
        self._initialise(hidden_size)

    @override
    def forward(self, source_NS: Tensor, lengths_N: Tensor, target_NT: Tensor) -> Tensor:
        memory_NSH = self.encoder(self.source_embedding(source_NS), lengths_N)
        logits_NTV: Tensor = self.classifier(self.decoder(self.target_embedding(target_NT), memory_NSH, lengths_N))
        return logits_NTV

    def _initialise(self, hidden_size: int) -> None:
        """Uniform in ±0.1 at the published width; narrower ones have larger weights, so that sums spread as far.

        (With ±0.1, a network 64 wide needs several times as many steps before its attention finds anything.)
        """
        limit = 0.1 * math.sqrt(PUBLISHED_WIDTH / hidden_size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -limit, limit)
        nn.init.zeros_(self.decoder.attention.score.bias)
        nn.init.constant_(self.decoder.attention.score.length, 1 / math.sqrt(hidden_size))
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.zeros_(embedding.weight[PAD])
