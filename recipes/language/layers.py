"""Transformer layers that all language recipes are made of. tokens -> embeddings -> *layers* -> head.

Plain modules and whole-tensor functions only, one module a layer: a pipeline may cut between any two, and an array of
variants may run them fused. Norms come after the residual sums, as in the published networks (Vaswani'17, Devlin'18).

Shapes: N sequences, S tokens, H hidden units, A attention heads.
"""

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import ConfigError

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}


class SelfAttention(nn.Module):
    """Multi-head attention of a sequence to itself, with its output projection."""

    def __init__(self, hidden: int, heads: int, *, dropout: float, causal: bool) -> None:
        super().__init__()
        if hidden % heads:
            raise ConfigError(
                f"recipe.hidden={hidden} is not divisible by recipe.heads={heads}; heads share the hidden units evenly"
            )
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, hidden)

    @override
    def forward(self, x_NSH: Tensor, mask_N11S: Tensor | None = None) -> Tensor:
        attended_NASD = F.scaled_dot_product_attention(
            self._by_head(self.query(x_NSH)),
            self._by_head(self.key(x_NSH)),
            self._by_head(self.value(x_NSH)),
            attn_mask=mask_N11S,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        projected: Tensor = self.output(attended_NASD.transpose(1, 2).flatten(2))
        return projected

    def _by_head(self, x_NSH: Tensor) -> Tensor:
        return x_NSH.view(*x_NSH.shape[:-1], self.heads, -1).transpose(1, 2)


class TransformerLayer(nn.Module):
    """Attention and a feed-forward network, each added to its input and normalised."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        feed_forward: int,
        *,
        dropout: float,
        activation: str = "gelu",
        causal: bool = False,
        norm_epsilon: float = 1e-12,
    ) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden, heads, dropout=dropout, causal=causal)
        self.attention_dropout = nn.Dropout(dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=norm_epsilon)
        self.widen = nn.Linear(hidden, feed_forward)
        self.activation = ACTIVATIONS[activation]()
        self.narrow = nn.Linear(feed_forward, hidden)
        self.output_dropout = nn.Dropout(dropout)
        self.output_norm = nn.LayerNorm(hidden, eps=norm_epsilon)

    @override
    def forward(self, x_NSH: Tensor, mask_N11S: Tensor | None = None) -> Tensor:
        x_NSH = self.attention_norm(x_NSH + self.attention_dropout(self.attention(x_NSH, mask_N11S)))
        widened = self.activation(self.widen(x_NSH))
        output: Tensor = self.output_norm(x_NSH + self.output_dropout(self.narrow(widened)))
        return output


def start_small(module: nn.Module, *, deviation: float = 0.02) -> None:
    """BERT's initial weights: normal with a small deviation, biases zero, norms the identity."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=deviation)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
