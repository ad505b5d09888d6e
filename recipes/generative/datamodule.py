"""What the images for DCGAN share: their settings, and fakes where the discriminator trains alone."""

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

from ..loading import SplitData, require_least

Sample = tuple[Tensor, ...]
TILES = 4
"""A fake is a real image cut into 4 × 4 tiles that are put together in another order."""


class UnlabelledImages(SplitData):
    """Batches of `(images,)` in −1..1; with `fakes`, batches of `(images, is_real)` of which every second is a fake."""

    for_batch_norm = True

    def __init__(self, *, image_size: int, batch_size: int, num_workers: int, fakes: bool) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        require_least(image_size=(image_size, TILES))
        if fakes and image_size % TILES:
            raise ConfigError(f"data.image_size={image_size} does not divide into {TILES} tiles; set a multiple of it")
        self.image_size, self.fakes = image_size, fakes

    @override
    def _loader(self, dataset: Dataset[Sample], *, shuffle: bool = False) -> DataLoader[Sample]:
        return super()._loader(WithFakes(dataset) if self.fakes else dataset, shuffle=shuffle)


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
