"""What a preparation tells whoever asked for it. Nothing here prints: the command line brings its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Report(Protocol):
    """Sentences, and bars for work that takes long."""

    def say(self, text: str) -> None:
        """One fact."""

    def bar(self, what: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
        """A bar while the block lasts; the block tells by how many bytes it has advanced."""


class Silence:
    """For use from Python, where nobody looks."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def bar(self, what: str, total_bytes: int | None) -> Iterator[Advance]:
        yield lambda _: None
