"""What the image data sets share: their settings, and checks of a folder of class folders."""

from pathlib import Path

from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from pl_pipe.errors import DataError

from ..loading import SplitData, require_least

Sample = tuple[Tensor, ...]


class ImageData(SplitData):
    """Batches of `(images, labels)`; a subclass fills `train_set`, `val_set` and `test_set` in `setup`."""

    for_batch_norm = True

    def __init__(self, *, num_classes: int, image_size: int, batch_size: int, num_workers: int) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        require_least(num_classes=(num_classes, 2), image_size=(image_size, 1))
        self.num_classes = num_classes
        self.image_size = image_size


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
