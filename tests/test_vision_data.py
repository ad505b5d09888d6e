"""The image data sets: what they hold, and what they say when it is not there."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.vision.cifar10 import Cifar10Data
from pl_pipe.recipes.vision.digits import DigitsData
from pl_pipe.recipes.vision.imagenet import ImageNetData
from pl_pipe.recipes.vision.synthetic import SyntheticImages
from tests.conftest import image_folder


def test_digits_are_split_once_and_normalised() -> None:
    data = DigitsData(image_size=8)
    data.setup("fit")
    splits = [data.train_set.tensors[0], data.val_set.tensors[0], data.test_set.tensors[0]]  # type: ignore[attr-defined]
    assert [len(split) for split in splits] == [1280, 258, 259]
    pixels = torch.cat(splits)
    assert len({image.numpy().tobytes() for image in pixels}) == 1797, "an image stands in two splits"
    assert pixels.mean().item() == pytest.approx(0, abs=1e-3)
    assert pixels.std().item() == pytest.approx(1, abs=1e-3)


def test_digits_split_depends_on_its_seed_alone() -> None:
    first, again, other = (DigitsData(image_size=8, split_seed=seed) for seed in (0, 0, 1))
    for data in (first, again, other):
        torch.manual_seed(len(str(data)))
        data.setup("fit")
    labels = [data.train_set.tensors[1] for data in (first, again, other)]  # type: ignore[attr-defined]
    assert torch.equal(labels[0], labels[1])
    assert not torch.equal(labels[0], labels[2])


def test_synthetic_repeats_with_its_seed_and_has_any_shape() -> None:
    def sample(seed: int) -> torch.Tensor:
        data = SyntheticImages(image_size=5, channels=2, num_classes=3, num_samples=100, num_val_samples=7, seed=seed)
        data.setup("fit")
        assert [len(part) for part in (data.train_set, data.val_set)] == [100, 7]  # type: ignore[arg-type]
        image, label = data.train_set[99]
        assert image.shape == (2, 5, 5)
        assert 0 <= int(label) < 3
        return image

    assert torch.equal(sample(1), sample(1))
    assert not torch.equal(sample(1), sample(2))
    with pytest.raises(ConfigError, match=r"data.num_samples=0"):
        SyntheticImages(num_samples=0)


def test_imagenet_folder_is_read(tmp_path: Path) -> None:
    image_folder(tmp_path, splits=("train", "val"), classes=3)
    data = ImageNetData(root=str(tmp_path), num_classes=3, image_size=24, batch_size=4, num_workers=0)
    data.setup("fit")
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (4, 3, 24, 24)
    assert labels.tolist() == [0, 0, 1, 1]


def test_cifar10_as_folders_and_as_torchvision_unpacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(tmp_path / "folders", splits=("train", "test"), classes=10, images=1, size=32)
    packed = tmp_path / "packed" / "cifar-10-batches-py"
    packed.mkdir(parents=True)
    pixels = np.arange(2 * 3072, dtype=np.uint32).astype(np.uint8).reshape(2, 3072)
    for name in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]:
        (packed / name).write_bytes(pickle.dumps({"data": pixels, "labels": [3, 7]}))
    (packed / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(k) for k in range(10)]}))
    with pytest.raises(DataError, match=r"cifar-10-batches-py is incomplete or damaged; unpack it anew"):
        Cifar10Data(root=str(tmp_path / "packed"))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for folder, sizes in (("folders", [10, 10]), ("packed", [10, 2])):
        data = Cifar10Data(root=str(tmp_path / folder), batch_size=2)
        data.setup("fit")
        assert [len(part) for part in (data.train_set, data.val_set)] == sizes  # type: ignore[arg-type]
        assert next(iter(data.train_dataloader()))[0].shape == (2, 3, 32, 32)


def test_the_real_subset_is_read(cifar10_subset: Path) -> None:
    data = Cifar10Data(root=str(cifar10_subset))
    data.setup("fit")
    assert [len(part) for part in (data.train_set, data.val_set)] == [10_000, 2_000]  # type: ignore[arg-type]


def layout(root: Path, *paths: str) -> str:
    for path in paths:
        (root / path).mkdir(parents=True)
    return str(root)


@pytest.mark.parametrize("kind", [ImageNetData, Cifar10Data])
def test_bad_roots_are_refused(kind: type, tmp_path: Path) -> None:
    name = "imagenet" if kind is ImageNetData else "cifar10"
    with pytest.raises(DataError, match=f"data={name} reads files from disk; set data.root to the folder that holds"):
        kind(root=None)
    with pytest.raises(DataError, match=r"data.root=/no/such does not exist; set data.root"):
        kind(root="/no/such")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file is not a folder; set data.root"):
        kind(root=str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"empty is empty; set data.root"):
        kind(root=layout(tmp_path / "empty", "."))
    with pytest.raises(DataError, match=r"train has no class folders"):
        kind(root=layout(tmp_path / "bare", "train", "test", "val"), num_classes=2)
    with pytest.raises(DataError, match=r"train has 3 class folders, data.num_classes is 2; set data.num_classes=3"):
        kind(root=layout(tmp_path / "three", "train/a", "train/b", "train/c", "test", "val"), num_classes=2)
    with pytest.raises(DataError, match=r"train/a holds no images"):
        kind(root=layout(tmp_path / "hollow", "train/a", "train/b", "test", "val"), num_classes=2)


@pytest.mark.parametrize(("setting", "value"), [("batch_size", 0), ("num_workers", -1), ("num_classes", 1)])
def test_settings_out_of_range_are_refused(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"data.{setting}={value} is too small; the least is"):
        DigitsData(**{setting: value})
