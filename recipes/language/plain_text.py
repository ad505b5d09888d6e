"""Documents of sentences from text files, an empty line between documents."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ..text_file import lines_of

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")


def read_documents(paths: Iterable[Path], *, advance: Callable[[int], None] | None = None) -> Iterator[list[str]]:
    """Sentences of one document after the other; documents are separated by empty lines, and end with their file.

    `advance` is told the bytes of each file that has been read.
    """
    for path in paths:
        document: list[str] = []
        for line in lines_of(path):
            if line.strip():
                document += _SENTENCE_END.split(line.strip())
            elif document:
                yield document
                document = []
        if document:
            yield document
        if advance is not None:
            advance(path.stat().st_size)
