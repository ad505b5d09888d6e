"""CIFAR-10 as `data=cifar10` reads it: the archive's own folder, cifar-10-batches-py/."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from .preparation import Preparation
from .report import Report
from .unpacking import unpack


class Cifar10Preparation(Preparation):
    """One archive."""

    name, trains = "cifar10", "resnet56"

    @override
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        return [made for archive in files.values() for made in unpack(archive, root, report)]
