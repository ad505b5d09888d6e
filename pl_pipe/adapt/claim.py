"""Who trains in a folder: the workers that began last. elastic policy -> *claim* -> file.

torchrun takes an agent for gone that has given no sign of life for some seconds, as happens on a busy machine. Then
both sides start workers that know nothing of each other, and would train the same run twice. Whoever finds that others
have begun after it ends, and joins them.
"""

from pathlib import Path
from uuid import uuid4


class Claim:
    """A file with the word of the workers that began last; all hosts see it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def made(self) -> str:
        """The word of workers that begin now, by one of them."""
        word = uuid4().hex
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{word}")
        partial.write_text(word)
        partial.replace(self.path)
        return word

    def is_lost(self, word: str | None) -> bool:
        """Whether others have begun after those whose word it is."""
        return word is not None and self.path.is_file() and self.path.read_text() != word

    def end(self) -> None:
        self.path.unlink(missing_ok=True)
