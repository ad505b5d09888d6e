"""What the image data sets share: loaders over three splits, and checks of a folder of class folders."""

from pathlib import Path

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from typing_extensions import override

from pl_pipe.errors import ConfigError, DataError

Sample = tuple[Tensor, ...]


class ImageData(L.LightningDataModule):
    """Batches of `(images, labels)`; a subclass fills `train_set`, `val_set` and `test_set` in `setup`."""

    train_set: Dataset[Sample]
    val_set: Dataset[Sample]
    test_set: Dataset[Sample]

    def __init__(self, *, num_classes: int, image_size: int, batch_size: int, num_workers: int) -> None:
        super().__init__()
        for name, value, least in (
            ("num_classes", num_classes, 2),
            ("image_size", image_size, 1),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigError(f"data.{name}={value} is too small; the least is {least}")
        self.num_classes = num_classes
        self.image_size = image_size
        self.batch_size = batch_size
        self.num_workers = num_workers

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
        # Batch norm cannot train on a last batch of one sample.
        lone = shuffle and self.batch_size > 1 and len(dataset) % self.batch_size == 1  # type: ignore[arg-type]
        return DataLoader(
            dataset,
            drop_last=lone,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def data_root(root: str | None, *, name: str, holds: str) -> Path:
    """The existing, non-empty folder at `data.root`."""
    if root is None:
        raise DataError(f"data={name} reads files from disk; set data.root to the folder that holds {holds}")
    path = Path(root).expanduser()
    if not path.is_dir():
        fact = "is not a folder" if path.exists() else "does not exist"
        raise DataError(f"data.root={root} {fact}; set data.root to the folder that holds {holds}")
    if not any(path.iterdir()):
        raise DataError(f"data.root={root} is empty; set data.root to the folder that holds {holds}")
    return path


def check_class_folders(folder: Path, *, num_classes: int) -> None:
    """Refuses a split folder that is absent, or whose class folders are not the `num_classes` expected ones."""
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; it should hold one folder of images per class")
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    if not classes:
        raise DataError(f"{folder} has no class folders; it should hold one folder of images per class")
    if len(classes) != num_classes:
        raise DataError(
            f"{folder} has {len(classes)} class folders, data.num_classes is {num_classes}; "
            f"set data.num_classes={len(classes)} or mend the folder"
        )
    for entry in classes:
        if not any(file.suffix.lower() in IMG_EXTENSIONS for file in entry.iterdir()):
            raise DataError(f"{entry} holds no images (looked for {', '.join(IMG_EXTENSIONS)}); remove or fill it")
