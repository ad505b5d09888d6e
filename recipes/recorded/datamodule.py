"""Batches for a model that computes nothing: the numbers of the samples."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError


class RecordedData(L.LightningDataModule):
    """`batches` mini-batches of `batch_size` numbers. The input's own bytes are not made: every stage that reads the
    batch loads it for itself, so they never cross a link."""

    def __init__(self, *, batch_size: int = 128, batches: int = 32) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("batches", batches)):
            if value < 1:
                raise ConfigError(f"data.{name}={value} is too small; the least is 1")
        self.batch_size, self.batches = batch_size, batches

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Numbers(self.batch_size * self.batches), self.batch_size)


class _Numbers(Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)
