"""Runs that fail while others go on: benchmarks -> *failures* -> what is told at the end."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """A benchmark of many runs takes hours: one that fails is told at once, does not end the others, and is counted."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Ctrl-C and SIGTERM still end the program
            traceback.print_exc()
            print(f"{name} failed; the others go on", flush=True)
            lines = str(error).splitlines()
            self._found.append(f"{name} ({lines[0] if lines else type(error).__name__})")

    def end(self) -> None:
        """Ends the program with an error where a run failed."""
        if self._found:
            raise SystemExit(f"{len(self._found)} failed; the same command tries them again: {'; '.join(self._found)}")
