"""CIFAR-10 from disk, as torchvision unpacks it or as folders of images."""

from pathlib import Path

import torch
from torchvision.datasets import CIFAR10, ImageFolder
from torchvision.transforms import v2
from typing_extensions import override

from pl_pipe.errors import DataError

from .datamodule import ImageData, check_class_folders, data_root

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
HOLDS = "cifar-10-batches-py/, or train/<class>/ and test/<class>/ images"


class Cifar10Data(ImageData):
    """Padded random crops and flips in training; CIFAR-10 has no validation split, so val=test as is usual."""

    def __init__(
        self,
        *,
        root: str | None,
        num_classes: int = 10,
        image_size: int = 32,
        batch_size: int = 128,
        num_workers: int = 0,
        augment: bool = True,
    ) -> None:
        super().__init__(num_classes=num_classes, image_size=image_size, batch_size=batch_size, num_workers=num_workers)
        self.augment = augment
        self.root = data_root(root, name="cifar10", holds=HOLDS)
        self.pickled = (self.root / CIFAR10.base_folder).is_dir()
        if self.pickled:
            self._cifar10(train=True)  # torchvision checks the files' sums here, before any process is started
        else:
            for split in ("train", self._test_folder().name):
                check_class_folders(self.root / split, num_classes=num_classes)

    @override
    def setup(self, stage: str) -> None:
        finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        fit = [] if self.image_size == 32 else [v2.Resize(self.image_size)]
        crops = [v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()] if self.augment else []
        train, test = v2.Compose([*crops, *fit, *finish]), v2.Compose([*fit, *finish])
        if self.pickled:
            self.train_set = self._cifar10(train=True, transform=train)
            self.val_set = self._cifar10(train=False, transform=test)
        else:
            self.train_set = ImageFolder(str(self.root / "train"), train)
            self.val_set = ImageFolder(str(self._test_folder()), test)
        self.test_set = self.val_set

    def _cifar10(self, *, train: bool, transform: v2.Compose | None = None) -> CIFAR10:
        try:
            return CIFAR10(str(self.root), train=train, transform=transform)
        except RuntimeError as error:
            raise DataError(f"{self.root / CIFAR10.base_folder} is incomplete or damaged; unpack it anew") from error

    def _test_folder(self) -> Path:
        """`test/`, or `val/` where someone named it so."""
        for name in ("test", "val"):
            if (self.root / name).is_dir():
                return self.root / name
        raise DataError(f"data.root={self.root} has no test/ folder; set data.root to the folder that holds {HOLDS}")
