"""Where a token stands, as sines and cosines that are added to it (Vaswani et al., 2017)."""

import math

import torch
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.errors import ConfigError


class Positions(nn.Module):
    """A table of as many rows as a sequence may have tokens."""

    table: Tensor

    def __init__(self, length: int, hidden: int) -> None:
        super().__init__()
        if hidden % 2:
            raise ConfigError(f"recipe.hidden={hidden} is odd; sines and cosines come in pairs, choose an even number")
        place = torch.arange(length).unsqueeze(1)
        rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
        table = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=-1).flatten(1)
        self.register_buffer("table", table, persistent=False)

    @override
    def forward(self, x_NSH: Tensor) -> Tensor:
        length = x_NSH.shape[1]
        if length > len(self.table):
            raise ConfigError(
                f"sequences have {length} tokens, the model has {len(self.table)} positions; "
                f"set recipe.positions={length} or shorten data.sequence_length"
            )
        return x_NSH + self.table[:length]
