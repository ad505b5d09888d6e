"""ImageNet as `data=imagenet` reads it: train/<class>/ and val/<class>/, from the archives that ILSVRC2012 gives out.

ILSVRC2012_img_train.tar   a tar a class      ──► train/<class>/*.JPEG
ILSVRC2012_img_val.tar     numbered images    ─┬► val/<class>/*.JPEG
ILSVRC2012_devkit_t12.tar.gz, or a list       ─┘  which number shows which class
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import override

from pl_pipe.errors import DataError

from .preparation import Preparation
from .report import Advance, Report
from .space import check_space
from .unpacking import check_member, opened, unpack, write_member
from .validation_labels import labels_from_devkit, labels_from_list

TRAIN, VAL, DEVKIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_NUMBER = re.compile(r"_(\d+)\.jpe?g$", re.IGNORECASE)


class ImageNetPreparation(Preparation):
    """Three archives that the user has; each class is unpacked as a whole, so that a broken call can go on."""

    name, trains = "imagenet", "resnet50"

    def __init__(self, *, validation_labels: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.validation_labels = None if validation_labels is None else Path(validation_labels).expanduser()
        if self.validation_labels is not None:
            self.sources = [source for source in self.sources if source.file != DEVKIT]

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"validation_labels": str(self.validation_labels)}

    @override
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        if self.validation_labels is None:
            labels = labels_from_devkit(files[DEVKIT])
        else:
            labels = labels_from_list(self.validation_labels)
        unpack_classes(files[TRAIN], root / "train", report)
        self._unpack_validation(files[VAL], root / "val", labels, report)
        known = {folder.name for folder in (root / "train").iterdir() if folder.is_dir()}
        strangers = sorted({folder.name for folder in (root / "val").iterdir()} - known)
        if strangers:
            raise DataError(
                f"{root / 'val' / strangers[0]} is a class that train/ does not have; the labels do not fit"
            )
        report.say(f"{len(known)} classes")
        return [root / "train", root / "val"]

    @staticmethod
    def _unpack_validation(archive: Path, folder: Path, labels: Sequence[str], report: Report) -> None:
        def placing(name: str) -> str | None:
            found = _NUMBER.search(name)
            if found is None:
                return None
            number = int(found[1])
            if not 1 <= number <= len(labels):
                raise DataError(f"{archive} has image {name}, but there are {len(labels)} labels; they do not fit")
            return f"{labels[number - 1]}/{PurePosixPath(name).name}"

        folder.mkdir(parents=True, exist_ok=True)
        if not unpack(archive, folder, report, placing=placing):
            raise DataError(
                f"{archive} has no images called …_<number>.JPEG; fetch the validation images of ILSVRC2012"
            )


def unpack_classes(archive: Path, folder: Path, report: Report) -> None:
    """Each class's own archive into a folder of its name, which appears when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with opened(archive) as tar:
        members = []
        for member in tar:
            check_member(member, archive)
            if member.isfile() and member.name.endswith(".tar"):
                members.append(member)
        if not members:
            raise DataError(f"{archive} has no archive of a class in it; fetch the training images of ILSVRC2012")
        missing = [member for member in members if not (folder / _class_of(member.name)).is_dir()]
        if 0 < len(missing) < len(members):
            report.say(f"{len(members) - len(missing)} of {len(members)} classes are there already")
        wanted = sum(member.size for member in missing)
        check_space(folder, wanted, what=f"unpacking {archive.name}")
        with report.bar(f"unpacking {archive.name}", wanted) as advance:
            for member in missing:
                inside = tar.extractfile(member)
                assert inside is not None
                with opened(archive / member.name, inside) as images:
                    _unpack_class(images, archive / member.name, folder / _class_of(member.name))
                advance(member.size)


def _unpack_class(images: Any, archive: Path, target: Path) -> None:
    part = target.with_name(f".{target.name}.part")
    if part.exists():
        shutil.rmtree(part)  # of a call that was broken off
    part.mkdir()
    nothing: Advance = lambda _: None  # noqa: E731
    for member in images:
        check_member(member, archive)
        if member.isfile():
            write_member(images, member, part / PurePosixPath(member.name).name, nothing, archive=archive)
    part.rename(target)


def _class_of(member: str) -> str:
    return PurePosixPath(member).stem
