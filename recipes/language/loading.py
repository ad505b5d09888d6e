"""What the language data modules share: checked settings, and samples that are dictionaries of tensors."""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

Sample = dict[str, Tensor]


class Samples(Dataset[Sample]):
    """Rows of tensors that lie in memory."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @override
    def __getitem__(self, index: int) -> Sample:
        return {name: values[index] for name, values in self.columns.items()}


class TextData(L.LightningDataModule):
    """Loaders over three splits; a subclass fills `train_set`, `val_set` and `test_set` in `setup`."""

    train_set: Dataset[Sample]
    val_set: Dataset[Sample]
    test_set: Dataset[Sample]
    collate_fn: Callable[[Any], Any] | None = None
    """What makes a batch of samples; torch's own if None."""

    def __init__(self, *, batch_size: int, num_workers: int) -> None:
        super().__init__()
        require_least(batch_size=(batch_size, 1), num_workers=(num_workers, 0))
        self.batch_size, self.num_workers = batch_size, num_workers

    @override
    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.train_set, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.val_set)

    @override
    def test_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.test_set)

    @override
    def predict_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self.test_set)

    def _loader(self, dataset: Dataset[Sample], *, shuffle: bool = False) -> DataLoader[Sample]:
        return DataLoader(
            dataset,
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
