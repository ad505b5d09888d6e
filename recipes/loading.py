"""What data modules share: checked settings, and loaders over three splits."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError


class SplitData(L.LightningDataModule):
    """A subclass fills `train_set`, `val_set` and `test_set` in `setup`."""

    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]
    collate_fn: Callable[[Any], Any] | None = None
    """What makes a batch of samples; torch's own if None."""
    for_batch_norm = False
    """Whether a last training batch of one sample is left out: batch norm cannot train on it."""

    def __init__(self, *, batch_size: int, num_workers: int) -> None:
        super().__init__()
        require_least(batch_size=(batch_size, 1), num_workers=(num_workers, 0))
        self.batch_size, self.num_workers = batch_size, num_workers

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.train_set, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.val_set)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_set)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self._loader(self.test_set)

    def _loader(self, dataset: Dataset[Any], *, shuffle: bool = False) -> DataLoader[Any]:
        lone = (
            shuffle and self.for_batch_norm and self.batch_size > 1 and len(dataset) % self.batch_size == 1  # type: ignore[arg-type]
        )
        return DataLoader(
            dataset,
            drop_last=lone,
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=type(self).collate_fn,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def require_least(**settings: tuple[int, int]) -> None:
    """Each setting's value, and the least that makes sense."""
    for name, (value, least) in settings.items():
        if value < least:
            raise ConfigError(f"data.{name}={value} is too small; the least is {least}")
