"""What the images for DCGAN share: loaders over three splits, and fakes where the discriminator trains alone."""

import lightning as L
import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

Sample = tuple[Tensor, ...]
TILES = 4
"""A fake is a real image cut into 4 × 4 tiles that are put together in another order."""


class UnlabelledImages(L.LightningDataModule):
    """Batches of `(images,)` in −1..1; with `fakes`, batches of `(images, is_real)` of which every second is a fake."""

    train_set: Dataset[Sample]
    val_set: Dataset[Sample]
    test_set: Dataset[Sample]

    def __init__(self, *, image_size: int, batch_size: int, num_workers: int, fakes: bool) -> None:
        super().__init__()
        for name, value, least in (
            ("image_size", image_size, TILES),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigError(f"data.{name}={value} is too small; the least is {least}")
        if fakes and image_size % TILES:
            raise ConfigError(f"data.image_size={image_size} does not divide into {TILES} tiles; set a multiple of it")
        self.image_size, self.batch_size, self.num_workers, self.fakes = image_size, batch_size, num_workers, fakes

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
        if self.fakes:
            dataset = WithFakes(dataset)
        # Batch norm cannot train on a last batch of one image.
        lone = shuffle and self.batch_size > 1 and len(dataset) % self.batch_size == 1  # type: ignore[arg-type]
        return DataLoader(
            dataset,
            drop_last=lone,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class WithFakes(Dataset[Sample]):
    """As many images as there are; those of odd number are shown as fakes, always in the same disorder."""

    def __init__(self, images: Dataset[Sample]) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)  # type: ignore[arg-type]

    @override
    def __getitem__(self, index: int) -> Sample:
        image = self.images[index][0]
        if index % 2 == 0:
            return image, torch.tensor(1.0)
        return scrambled(image, Generator().manual_seed(index)), torch.tensor(0.0)


def scrambled(image: Tensor, random: Generator) -> Tensor:
    """The image's tiles in an order in which at least one has another place; [channels, side, side]."""
    channels, side = image.shape[0], image.shape[1] // TILES
    tiles = image.unfold(1, side, side).unfold(2, side, side).reshape(channels, TILES * TILES, side, side)
    order = torch.randperm(TILES * TILES, generator=random)
    if torch.equal(order, torch.arange(len(order))):
        order = order.roll(1)
    mixed = tiles[:, order].reshape(channels, TILES, TILES, side, side)
    return mixed.permute(0, 1, 3, 2, 4).reshape(image.shape)
