"""Pairs of sentences from two text files, line by line: nothing is held but the line. files -> *corpus* -> encoded.

What is wrong with a file is said with its name and line number.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pl_pipe.errors import DataError

from ..text_file import lines_of

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
