"""Texts as one long row of token numbers, on disk and mapped into memory. lines -> *tokens* -> sequences.

A text is read line by line, never as a whole: once to count its tokens, once to number them. The numbers stay in the
cache folder under a name that changes with the file, so the next run starts at once.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pl_pipe.errors import ConfigError, DataError

from ..cache import cache_folder
from ..text_file import lines_of

Tokens = npt.NDArray[np.int32]
UNKNOWN, END = "<unk>", "<eos>"
UNITS: dict[str, Callable[[str], list[str]]] = {"word": str.split, "character": list}
_LINES_AT_ONCE = 1024


@dataclass(frozen=True)
class Part:
    """Lines of a file; `last` None is its end."""

    path: Path
    first: int = 0
    last: int | None = None

    def lines(self) -> Iterator[str]:
        return islice(lines_of(self.path), self.first, self.last)

    @property
    def mark(self) -> str:
        """Changes when the file does."""
        facts = self.path.stat()
        return f"{self.path.resolve()} {facts.st_size} {facts.st_mtime_ns} {self.first} {self.last}"


def count_tokens(lines: Iterable[str], *, unit: str, size: int) -> list[str]:
    """The most frequent tokens, at most `size`; `<unk>` and the end of a line are always among them."""
    if unit not in UNITS:
        raise ConfigError(f"data.unit={unit} is unknown; choose one of {', '.join(UNITS)}")
    if size < 3:
        raise ConfigError(f"data.vocabulary_size={size} is too small; the least is 3")
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(UNITS[unit](line))
    for own in (UNKNOWN, END):
        counts.pop(own, None)
    frequent = sorted(counts, key=lambda token: (-counts[token], token))
    return [UNKNOWN, END, *frequent[: size - 2]]


def number_tokens(lines: Iterable[str], vocabulary: list[str], *, unit: str) -> Iterator[Tokens]:
    """Token numbers, some lines at a time; every line ends with `<eos>`."""
    ids = {token: number for number, token in enumerate(vocabulary)}
    rest = iter(lines)
    while some := list(islice(rest, _LINES_AT_ONCE)):
        numbers = [ids.get(token, 0) for line in some for token in (*UNITS[unit](line), END)]
        yield np.array(numbers, np.int32)


def numbered(part: Part, counted: Part, *, unit: str, size: int) -> Tokens:
    """The tokens of `part`, numbered by those of `counted`, mapped from the cache; made there if need be."""
    key = hashlib.sha256(f"{part.mark}|{counted.mark}|{unit}|{size}".encode()).hexdigest()[:24]
    path = cache_folder("text") / f"{key}.int32"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        vocabulary = count_tokens(counted.lines(), unit=unit, size=size)
        # Ranks may do this at once: each writes a file of its own, and whichever comes last gives it its name.
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            try:
                for numbers in number_tokens(part.lines(), vocabulary, unit=unit):
                    numbers.tofile(file)
            except BaseException:
                Path(file.name).unlink()
                raise
        Path(file.name).replace(path)
    if not path.stat().st_size:
        raise DataError(f"{part.path} has no text; give a file with lines of text")
    mapped: Any = np.memmap(path, np.int32, mode="r")
    return mapped  # type: ignore[no-any-return]
