"""Text files read line by line, plain or gzipped; an error tells the line."""

import gzip
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from pl_pipe.errors import DataError

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")


def read_lines(path: Path) -> Iterator[str]:
    """The lines without their ends."""
    if not path.is_file():
        raise DataError(f"{path} is no file; give a text file, plain or .gz")
    number = 0
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield line.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}: byte {error.start + 1} is not UTF-8; convert the file, as in "
                        "iconv -f latin1 -t utf-8"
                    ) from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged after line {number} ({error}); unpack or fetch it anew") from error


def read_documents(paths: Iterable[Path]) -> Iterator[list[str]]:
    """Sentences of one document after the other; documents are separated by empty lines, and end with their file."""
    for path in paths:
        document: list[str] = []
        for line in read_lines(path):
            if line.strip():
                document += _SENTENCE_END.split(line.strip())
            elif document:
                yield document
                document = []
        if document:
            yield document


def _opened(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]
