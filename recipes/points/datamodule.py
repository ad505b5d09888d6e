"""What the sets of point clouds share: loaders over three splits, and a common scale."""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

Sample = tuple[Tensor, ...]


class PointData(L.LightningDataModule):
    """Batches of `(points, labels)`, points as [clouds, points, 3]; a subclass fills the three sets in `setup`."""

    train_set: Dataset[Sample]
    val_set: Dataset[Sample]
    test_set: Dataset[Sample]

    def __init__(self, *, num_classes: int, num_points: int, batch_size: int, num_workers: int) -> None:
        super().__init__()
        for name, value, least in (
            ("num_classes", num_classes, 2),
            ("num_points", num_points, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigError(f"data.{name}={value} is too small; the least is {least}")
        self.num_classes, self.num_points = num_classes, num_points
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
        # Batch norm cannot train on a last batch of one cloud.
        lone = shuffle and self.batch_size > 1 and len(dataset) % self.batch_size == 1  # type: ignore[arg-type]
        return DataLoader(
            dataset,
            drop_last=lone,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def in_unit_ball(points: Tensor) -> Tensor:
    """Clouds moved to their centre and scaled so that the farthest point lies at 1; [..., points, 3]."""
    centred = points - points.mean(dim=-2, keepdim=True)
    radius = centred.norm(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)
    scaled: Tensor = centred / radius.clamp_min(torch.finfo(points.dtype).tiny)
    return scaled


def turns(angles: Tensor, *, axis: int) -> Tensor:
    """Rotations about a coordinate axis, to be multiplied from the right; [clouds, 3, 3]."""
    first, second = (other for other in range(3) if other != axis)
    matrices = torch.zeros(len(angles), 3, 3)
    matrices[:, axis, axis] = 1
    matrices[:, first, first] = matrices[:, second, second] = angles.cos()
    matrices[:, first, second], matrices[:, second, first] = angles.sin(), -angles.sin()
    return matrices
