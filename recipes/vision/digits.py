"""The embedded default: scikit-learn's 1,797 real handwritten digits (UCI), 8×8 pixels in 17 greys, upscaled to RGB."""

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
from typing_extensions import override

from pl_pipe.errors import ConfigError

from .datamodule import ImageData

NUM_TRAIN, NUM_VAL = 1280, 258  # 1,280 divides into whole batches; a last batch of one breaks batch norm
MEAN, STD = 0.3053, 0.3763  # of all pixels, scaled to 0..1


class DigitsData(ImageData):
    """Digits in a fixed random split: 1,280 for training, 258 for validation, 259 for test."""

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: int = 32,
        batch_size: int = 32,
        num_workers: int = 0,
        split_seed: int = 0,
    ) -> None:
        super().__init__(num_classes=num_classes, image_size=image_size, batch_size=batch_size, num_workers=num_workers)
        if num_classes < 10:
            raise ConfigError(f"data.num_classes={num_classes}, but there are 10 digits; set data.num_classes=10")
        self.split_seed = split_seed

    @override
    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits  # slow to import, and only this data set needs it

        digits = load_digits()
        grey = torch.from_numpy(digits.images).float().div_(16).sub_(MEAN).div_(STD)
        size = (self.image_size, self.image_size)
        grey = F.interpolate(grey.unsqueeze(1), size=size, mode="bilinear", align_corners=False)
        images = grey.expand(-1, 3, -1, -1)  # a view: three equal channels cost no memory
        labels = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.split_seed))
        train, val, test = order[:NUM_TRAIN], order[NUM_TRAIN : NUM_TRAIN + NUM_VAL], order[NUM_TRAIN + NUM_VAL :]
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])
        self.test_set = TensorDataset(images[test], labels[test])
