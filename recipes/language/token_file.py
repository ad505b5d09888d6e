"""Texts as one long row of token numbers, on disk and mapped into memory. lines -> *tokens* -> sequences.

A text is read line by line, never as a whole: once to count its tokens, once to number them. The list and the numbers
stay in the cache folder under names that change with the file, so the next run starts at once.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

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


def frequent_tokens(counted: Part, *, unit: str, size: int) -> list[str]:
    """What `count_tokens` finds in a part, from the cache; made there if need be."""
    path = cache_folder("text") / f"{_key(counted.mark, unit, size)}.txt"
    if not path.is_file():
        write_tokens(count_tokens(counted.lines(), unit=unit, size=size), path)
    return read_tokens(path)


def numbered(part: Part, vocabulary: list[str], *, unit: str) -> Tokens:
    """The tokens of `part` by their place in `vocabulary`, mapped from the cache; made there if need be."""
    path = cache_folder("text") / f"{_key(part.mark, unit, digest_of(vocabulary))}.int32"
    if not path.is_file():
        with _renamed_to(path) as file:
            for numbers in number_tokens(part.lines(), vocabulary, unit=unit):
                numbers.tofile(file)
    if not path.stat().st_size:
        raise DataError(f"{part.path} has no text; give a file with lines of text")
    mapped: Any = np.memmap(path, np.int32, mode="r")
    return mapped  # type: ignore[no-any-return]


def write_tokens(vocabulary: list[str], path: Path) -> None:
    """One a line; no token has the end of a line in it."""
    with _renamed_to(path) as file:
        file.write(text_of(vocabulary).encode())


def read_tokens(path: Path) -> list[str]:
    """A list as `write_tokens` leaves it."""
    if not path.is_file():
        raise DataError(f"data.vocabulary={path} is no file; give the vocabulary.txt of a run, or leave it out")
    try:
        found = tokens_of(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); give the vocabulary.txt of a run") from error
    if found[:2] != [UNKNOWN, END] or len(set(found)) != len(found):
        raise DataError(
            f"{path} is no list of different tokens that begins with {UNKNOWN} and {END}, but with "
            f"{', '.join(map(repr, found[:2]))}; give the vocabulary.txt of a run"
        )
    return found


def text_of(vocabulary: list[str]) -> str:
    return "\n".join(vocabulary) + "\n"


def tokens_of(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")


def digest_of(vocabulary: list[str]) -> str:
    """Sixteen letters that tell lists apart."""
    return hashlib.sha256(text_of(vocabulary).encode()).hexdigest()[:16]


def _key(*facts: object) -> str:
    return hashlib.sha256("|".join(map(str, facts)).encode()).hexdigest()[:24]


@contextmanager
def _renamed_to(path: Path) -> Iterator[IO[bytes]]:
    """Ranks may do this at once: each writes a file of its own, and whichever comes last gives it its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            yield file
        except BaseException:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)
