"""Point clouds and meshes from disk, in folders by class: ModelNet, ShapeNet, or anything laid out like them."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pl_pipe.errors import ConfigError, DataError

from ..vision.datamodule import data_root
from .cloud_file import SUFFIXES, read_cloud
from .datamodule import PointData, Sample, in_unit_ball, turns

HOLDS = "train/<class>/ and test/<class>/, or <class>/train/ and <class>/test/, or <class>/ with files " + "|".join(
    SUFFIXES
)
EVALUATED = ("test", "val")
JITTER = 0.02


@dataclass(frozen=True)
class CloudFiles:
    """The files of one split, and the number of each one's class."""

    paths: list[Path]
    labels: list[int]


class PointFilesData(PointData):
    """Random points, turns and jitter in training; the same points of a file every time in evaluation (test=val)."""

    def __init__(
        self,
        *,
        root: str | None,
        num_classes: int,
        num_points: int = 2500,
        batch_size: int = 32,
        num_workers: int = 0,
        val_fraction: float = 0.2,
        augment: bool = True,
        up_axis: int = 2,
    ) -> None:
        super().__init__(num_classes=num_classes, num_points=num_points, batch_size=batch_size, num_workers=num_workers)
        if not 0 < val_fraction < 1:
            raise ConfigError(f"data.val_fraction={val_fraction} is no part of the files; give one between 0 and 1")
        if up_axis not in (0, 1, 2):
            raise ConfigError(f"data.up_axis={up_axis} is no coordinate; give 0, 1 or 2")
        self.augment, self.up_axis = augment, up_axis
        self.root = data_root(root, name="point_files", holds=HOLDS)
        self.classes, self.train_files, self.val_files = find_files(self.root, val_fraction=val_fraction)
        if len(self.classes) != num_classes:
            raise DataError(
                f"data.root={root} has {len(self.classes)} classes, data.num_classes is {num_classes}; "
                f"set data.num_classes={len(self.classes)} or mend the folder"
            )

    @override
    def setup(self, stage: str) -> None:
        axis = self.up_axis if self.augment else None
        self.train_set = CloudSet(self.train_files, num_points=self.num_points, training=True, turned_about=axis)
        self.val_set = self.test_set = CloudSet(self.val_files, num_points=self.num_points)


class CloudSet(Dataset[Sample]):
    """Reads a file when it is asked for."""

    def __init__(
        self, files: CloudFiles, *, num_points: int, training: bool = False, turned_about: int | None = None
    ) -> None:
        self.files, self.num_points, self.training, self.turned_about = files, num_points, training, turned_about

    def __len__(self) -> int:
        return len(self.files.paths)

    @override
    def __getitem__(self, index: int) -> Sample:
        path = self.files.paths[index]
        # torch's generator is the one that loaders seed, a worker each; by name, a file always shows the same points.
        seed = int(torch.randint(2**31, ())) if self.training else zlib.crc32(path.name.encode())
        points = torch.from_numpy(read_cloud(path, self.num_points, np.random.default_rng(seed)))
        points = in_unit_ball(points)
        if self.turned_about is not None:
            points = _disturbed(points, axis=self.turned_about)
        return points, torch.tensor(self.files.labels[index])


def find_files(root: Path, *, val_fraction: float) -> tuple[list[str], CloudFiles, CloudFiles]:
    """The names of the classes, and the files for training and for validation."""
    if (root / "train").is_dir():
        test = next((root / name for name in EVALUATED if (root / name).is_dir()), None)
        if test is None:
            raise DataError(
                f"data.root={root} has train/ but no test/ folder; set data.root to the folder that holds {HOLDS}"
            )
        classes = _folders(root / "train")
        places = {name: (root / "train" / name, test / name) for name in classes}
        strangers = sorted(set(_folders(test)) - set(classes))
        if strangers:
            raise DataError(f"{test / strangers[0]} is a class that {root / 'train'} does not have; mend the folder")
    else:
        classes = _folders(root)
        places = {name: _own_split(root / name) for name in classes}
    if not classes:
        raise DataError(f"data.root={root} has no class folders; set data.root to the folder that holds {HOLDS}")
    train, val = CloudFiles([], []), CloudFiles([], [])
    for label, (train_folder, val_folder) in enumerate(places.values()):
        files = _files(train_folder)
        if train_folder == val_folder:  # no split of its own: by a number that depends on the name alone
            files.sort(key=lambda path: zlib.crc32(path.name.encode()))
            kept = max(1, min(round(len(files) * (1 - val_fraction)), len(files) - 1))
            parts = (sorted(files[:kept]), sorted(files[kept:]))
        else:
            parts = (files, _files(val_folder))
        for split, found in zip((train, val), parts, strict=True):
            split.paths.extend(found)
            split.labels.extend([label] * len(found))
    if not val.paths:
        raise DataError(f"data.root={root} has no file left for validation; raise data.val_fraction or add files")
    return classes, train, val


def _own_split(folder: Path) -> tuple[Path, Path]:
    test = next((folder / name for name in EVALUATED if (folder / name).is_dir()), None)
    if (folder / "train").is_dir() and test is not None:
        return folder / "train", test
    points = folder / "points" if (folder / "points").is_dir() else folder  # ShapeNet's part annotation
    return points, points


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES] if folder.is_dir() else []
    if not found:
        raise DataError(f"{folder} holds no points (looked for {', '.join(SUFFIXES)}); remove or fill it")
    return sorted(found)


def _disturbed(points: Tensor, *, axis: int) -> Tensor:
    angle = torch.rand(1) * 2 * torch.pi
    return points @ turns(angle, axis=axis)[0] + JITTER * torch.randn_like(points)
