"""ImageNet, or any folder laid out like it: `train/<class>/*.jpg` and `val/<class>/*.jpg`."""

import torch
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from typing_extensions import override

from .datamodule import ImageData, check_class_folders, data_root

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
CROP = 224 / 256  # validation crops this part of the shorter side


class ImageNetData(ImageData):
    """Random resized crops and flips in training, centre crops in validation; there are no test labels, so test=val."""

    def __init__(
        self,
        *,
        root: str | None,
        num_classes: int = 1000,
        image_size: int = 224,
        batch_size: int = 64,
        num_workers: int = 4,
    ) -> None:
        super().__init__(num_classes=num_classes, image_size=image_size, batch_size=batch_size, num_workers=num_workers)
        self.root = data_root(root, name="imagenet", holds="train/<class>/*.jpg and val/<class>/*.jpg")
        for split in ("train", "val"):
            check_class_folders(self.root / split, num_classes=num_classes)

    @override
    def setup(self, stage: str) -> None:
        finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        train = [v2.RandomResizedCrop(self.image_size), v2.RandomHorizontalFlip(), *finish]
        val = [v2.Resize(round(self.image_size / CROP)), v2.CenterCrop(self.image_size), *finish]
        self.train_set = ImageFolder(str(self.root / "train"), v2.Compose(train))
        self.val_set = self.test_set = ImageFolder(str(self.root / "val"), v2.Compose(val))
