"""Which class each of ImageNet's numbered validation images shows, by the names of the training folders."""

import io
from pathlib import Path
from typing import Any

from pl_pipe.errors import DataError

from .unpacking import opened

_TRUTH, _META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"


def labels_from_devkit(archive: Path) -> list[str]:
    """From the development kit: a number a line, and a Matlab file that says which class each number is."""
    content: dict[str, bytes] = {}
    with opened(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and name in (_TRUTH, _META):
                file = tar.extractfile(member)
                assert file is not None
                content[name] = file.read()
    absent = {_TRUTH, _META} - content.keys()
    if absent:
        raise DataError(f"{archive} has no {sorted(absent)[0]} in it; fetch the development kit of ILSVRC2012 (t12)")
    names = _class_names(content[_META], archive)
    try:
        return [names[int(line)] for line in content[_TRUTH].decode().split()]
    except (ValueError, KeyError) as error:
        raise DataError(f"{_TRUTH} in {archive} has something else than numbers of classes ({error})") from error


def labels_from_list(path: Path) -> list[str]:
    """From a text file: the class of image 1, 2, 3 …, a line each; or `image class` a line, in any order."""
    if not path.is_file():
        raise DataError(f"prepare.validation_labels={path} is no file; give one with a class a line")
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not rows or any(len(row) not in (1, 2) for row in rows):
        raise DataError(f"{path} must have a class a line, or an image and its class")
    if any(len(row) == 2 for row in rows):
        rows.sort(key=lambda row: row[0])  # names have their numbers padded with zeros
    return [row[-1] for row in rows]


def _class_names(meta: bytes, archive: Path) -> dict[int, str]:
    from scipy.io import loadmat  # comes with scikit-learn

    try:
        synsets: Any = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
        return {int(entry["ILSVRC2012_ID"]): str(entry["WNID"]) for entry in synsets.ravel()}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{_META} in {archive} cannot be read ({error}); fetch the development kit anew") from error
