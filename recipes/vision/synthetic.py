"""Seeded random images of any shape, for throughput: no disk, and no time spent on making a sample."""

import torch
from torch.utils.data import Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .datamodule import ImageData, Sample

POOL = 64  # distinct images; enough that no batch repeats itself in a way a cache could use


class SyntheticImages(ImageData):
    """`num_samples` random images with random labels, the same on every rank and in every run of one seed."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: int = 32,
        batch_size: int = 32,
        num_workers: int = 0,
        channels: int = 3,
        num_samples: int = 512,
        num_val_samples: int = 128,
        seed: int = 0,
    ) -> None:
        super().__init__(num_classes=num_classes, image_size=image_size, batch_size=batch_size, num_workers=num_workers)
        if min(channels, num_samples, num_val_samples) < 1:
            raise ConfigError(
                f"data=synthetic needs at least one channel and sample, got data.channels={channels}, "
                f"data.num_samples={num_samples}, data.num_val_samples={num_val_samples}"
            )
        self.shape = (channels, image_size, image_size)
        self.num_samples, self.num_val_samples, self.seed = num_samples, num_val_samples, seed

    @override
    def setup(self, stage: str) -> None:
        sizes = (self.num_samples, self.num_val_samples, self.num_val_samples)
        self.train_set, self.val_set, self.test_set = (
            RandomImages(self.shape, num_classes=self.num_classes, length=size, seed=self.seed * 3 + split)
            for split, size in enumerate(sizes)
        )


class RandomImages(Dataset[Sample]):
    """A pool of normal images and labels, repeated up to `length`."""

    def __init__(self, shape: tuple[int, ...], *, num_classes: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        pool = min(POOL, length)
        self.images = torch.randn(pool, *shape, generator=generator)
        self.labels = torch.randint(num_classes, (pool,), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.images[index % len(self.images)], self.labels[index % len(self.images)]
