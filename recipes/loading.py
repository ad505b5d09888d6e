"""What data modules share: checked settings, and loaders over three splits."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.callbacks.replicas import data_share
from pl_pipe.errors import ConfigError, DataError


class SplitData(L.LightningDataModule):
    """A subclass fills `train_set`, `val_set` and `test_set` in `setup`."""

    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]
    collate_fn: Callable[[Any], Any] | None = None
    """What makes a batch of samples; torch's own if None."""
    for_batch_norm = False
    """Whether a rank's last training batch is left out where it has one sample: batch norm cannot train on it."""

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
        return DataLoader(
            dataset,
            drop_last=shuffle and self.for_batch_norm and self._ends_alone(len(dataset)),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=shuffle,
            collate_fn=type(self).collate_fn,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _ends_alone(self, samples: int) -> bool:
        """Whether one sample is left for the last batch of a rank; Lightning deals samples out evenly."""
        replicas, _ = data_share(self.trainer)
        share = -(-samples // replicas)
        if share == 1 < self.batch_size:
            among = f" for {replicas} ranks" if replicas > 1 else ""
            raise DataError(
                f"the training set has {samples} sample(s){among}, and batch norm cannot train on one alone; give at "
                f"least two for each rank"
            )
        return self.batch_size > 1 and share % self.batch_size == 1


def require_least(**settings: tuple[int, int]) -> None:
    """Each setting's value, and the least that makes sense."""
    for name, (value, least) in settings.items():
        if value < least:
            raise ConfigError(f"data.{name}={value} is too small; the least is {least}")
