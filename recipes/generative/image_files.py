"""Images from disk, without labels: all those in a folder and the folders in it (LSUN, CelebA, your own)."""

import warnings
import zlib
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from typing_extensions import override

from pl_pipe.errors import ConfigError, DataError

from ..vision.datamodule import data_root
from .datamodule import Sample, UnlabelledImages

HOLDS = "images, in it or in folders below it"
LEAST = 3


class ImageFilesData(UnlabelledImages):
    """Each image's centre, shrunk to `image_size`; a fixed part of the files is for validation and test."""

    def __init__(
        self,
        *,
        root: str | None,
        image_size: int = 64,
        batch_size: int = 128,
        num_workers: int = 0,
        fakes: bool = False,
        val_fraction: float = 0.05,
    ) -> None:
        super().__init__(image_size=image_size, batch_size=batch_size, num_workers=num_workers, fakes=fakes)
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is no part of the files; give one between 0 and 1")
        self.root = data_root(root, name="image_files", holds=HOLDS)
        self.files = sorted(path for path in self.root.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        if len(self.files) < LEAST:
            raise DataError(
                f"data.root={root} holds {len(self.files)} images (looked for {', '.join(IMG_EXTENSIONS)}); at least "
                f"{LEAST} are needed, one for validation and two for batch norm to train on"
            )
        self.held_out = max(1, round(len(self.files) * val_fraction))

    @override
    def setup(self, stage: str) -> None:
        by_name = sorted(self.files, key=lambda path: zlib.crc32(str(path.relative_to(self.root)).encode()))
        self.train_set = ImageFiles(by_name[self.held_out :], self.image_size)
        self.val_set = self.test_set = ImageFiles(by_name[: self.held_out], self.image_size)


class ImageFiles(Dataset[Sample]):
    """Reads a file when it is asked for."""

    def __init__(self, paths: list[Path], image_size: int) -> None:
        self.paths = paths
        self.transform = v2.Compose(
            [
                v2.Resize(image_size),
                v2.CenterCrop(image_size),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.5] * 3),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    @override
    def __getitem__(self, index: int) -> Sample:
        path = self.paths[index]
        try:
            with warnings.catch_warnings(), Image.open(path) as image:
                warnings.simplefilter("ignore")  # of metadata that nobody reads here
                pixels: Tensor = self.transform(image.convert("RGB"))
        except (OSError, UnidentifiedImageError) as error:
            raise DataError(f"{path} cannot be read as an image ({error}); remove or mend the file") from error
        return (pixels,)
