"""A GNMT-like stack of residual LSTMs on sequences that can be learned, for `real.py`."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 1000, 20


class Residual(nn.Module):
    """One layer of the stack."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.lstm(x)[0]
        return x + hidden


class Recurrent(L.LightningModule):
    """Predicts the next word."""

    def __init__(self, width: int = 256, depth: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.classifier = nn.Linear(width, WORDS)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words = batch[0]
        scores = self.classifier(self.layers(self.embedding(words[:, :-1])))
        return F.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Sequences(L.LightningDataModule):
    """Words that count up in steps of their own."""

    def __init__(self, batch_size: int, samples: int = 1280) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        first = torch.randint(WORDS, (samples, 1), generator=generator)
        by = torch.randint(1, 5, (samples, 1), generator=generator)
        self.words = TensorDataset((first + by * torch.arange(LENGTH + 1)) % WORDS)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.words, self.batch_size, shuffle=True)
