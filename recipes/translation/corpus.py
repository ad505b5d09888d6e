"""Pairs of sentences from two text files, line by line: nothing is held but the line. files -> *corpus* -> encoded.

What is wrong with a file is said with its name and line number.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pl_pipe.errors import DataError

Pair = tuple[str, str]


class Corpus(Protocol):
    """Sentences with their translations, in a fixed order, as often as asked for."""

    @property
    def name(self) -> str:
        """How messages call it."""

    @property
    def fingerprint(self) -> str:
        """Text that is another one whenever the sentences may be."""

    def pairs(self) -> Iterator[Pair]: ...


@dataclass(frozen=True)
class TextPair:
    """Two files, plain or gzip, in which line k of one translates line k of the other."""

    source: Path
    target: Path

    @property
    def name(self) -> str:
        return f"{self.source} and {self.target}"

    @property
    def fingerprint(self) -> str:
        facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in self._files()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def pairs(self) -> Iterator[Pair]:
        source, target = (lines_of(file) for file in self._files())
        count = 0
        for left in source:
            right = next(target, None)
            if right is None:
                raise self._unequal(count + 1 + sum(1 for _ in source), count)
            count += 1
            yield left, right
        rest = sum(1 for _ in target)
        if rest:
            raise self._unequal(count, count + rest)

    def _unequal(self, source: int, target: int) -> DataError:
        return DataError(
            f"{self.source} has {source} lines, but {self.target} has {target}; line k of one must translate line k of "
            f"the other"
        )

    def _files(self) -> tuple[Path, Path]:
        for file in (self.source, self.target):
            if not file.is_file():
                raise DataError(f"{file} does not exist; name the files of the corpus (docs/translation.md)")
        return self.source, self.target


def lines_of(path: Path) -> Iterator[str]:
    """Lines without their ends. Only `\\n` ends one: text has other signs that Python would take for it."""
    number = 0
    try:
        with _opened(path) as file:
            for line in file:
                number += 1
                yield line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: byte {error.start + 1} ({error.object[error.start]:#04x}) is not UTF-8; convert "
            f"the file, or leave the line out of both files"
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged after line {number}: {error}; fetch it again") from error


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    with path.open("rb", buffering=1 << 20) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield gzip.GzipFile(fileobj=file) if packed else file
