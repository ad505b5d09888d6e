"""Archives unpacked file by file: nothing outside the target folder, no half-written file, going on where it ended."""

import lzma
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from pl_pipe.errors import DataError

from .report import Advance, Report
from .space import check_space

_CHUNK = 1 << 20
Placing = Callable[[str], str | None]
"""From a member's name to its place below the target folder; None leaves it out."""


def unpack(archive: Path, folder: Path, report: Report, *, placing: Placing = lambda name: name) -> list[Path]:
    """Unpacks a tar archive, compressed or not; returns the files that it has, also those that were there already.

    All members are looked at before the first is written, so a bad archive leaves nothing behind.
    """
    places = _places(archive, folder, placing, report)
    missing = {name: target for name, (target, size) in places.items() if not _is_there(target, size, archive)}
    wanted = sum(places[name][1] for name in missing)
    check_space(folder, wanted, what=f"unpacking {archive.name}")
    if missing:
        with opened(archive) as tar, report.bar(f"unpacking {archive.name}", wanted) as advance:
            for member in tar:
                if member.name in missing:
                    write_member(tar, member, missing.pop(member.name), advance, archive=archive)
    return [target for target, _ in places.values()]


def write_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, advance: Advance, *, archive: Path
) -> None:
    """One file, written beside its place and renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None
    part = target.with_name(f".{target.name}.part")
    try:
        with content, part.open("wb") as file:
            shutil.copyfileobj(content, file, _CHUNK)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if part.stat().st_size != member.size:
        part.unlink()
        raise DataError(f"{archive} ends in the middle of {member.name}; the archive is cut short: fetch it anew")
    part.replace(target)
    advance(member.size)


@contextmanager
def opened(archive: Path, inside: IO[bytes] | None = None) -> Iterator[tarfile.TarFile]:
    """A tar archive, or one inside another; damage becomes an error that names the file."""
    try:
        with tarfile.open(archive, "r:*" if inside is None else "r:", fileobj=inside) as tar:
            yield tar
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk, not the archive
        raise DataError(f"{archive} is damaged or no tar archive ({error}); fetch it anew") from error


def check_member(member: tarfile.TarInfo, archive: Path) -> None:
    """Refuses names that lead out of the target folder, and what is neither a file nor a folder."""
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or "\0" in member.name:
        raise DataError(
            f"{archive} has a member called {member.name!r}, which would be written outside of the target folder; "
            f"nothing was unpacked: fetch the archive from its publisher"
        )
    if not (member.isfile() or member.isdir()):
        raise DataError(
            f"{archive} has a member {member.name!r} that is neither a file nor a folder (a link or a device); "
            f"nothing was unpacked: fetch the archive from its publisher"
        )


def _places(archive: Path, folder: Path, placing: Placing, report: Report) -> dict[str, tuple[Path, int]]:
    """The target and the size of every file that is wanted, by its name in the archive."""
    found = {}
    with opened(archive) as tar, report.bar(f"reading {archive.name}", None) as advance:
        for member in tar:
            check_member(member, archive)
            advance(member.size)
            place = placing(member.name) if member.isfile() else None
            if place is not None:
                found[member.name] = (folder / place, member.size)
        assert tar.fileobj is not None
        while tar.fileobj.read(_CHUNK):  # the sum of a compressed archive stands at its very end
            pass
    return found


def _is_there(target: Path, size: int, archive: Path) -> bool:
    if not target.exists():
        return False
    if target.stat().st_size != size:
        raise DataError(
            f"{target} has {target.stat().st_size} bytes, in {archive} it has {size}; it is another file, so it was "
            f"left alone: move it away, or set data.root to another folder"
        )
    return True
