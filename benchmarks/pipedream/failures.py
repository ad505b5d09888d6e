"""Runs that fail while others go on: benchmarks -> *failures* -> what is told at the end."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """A benchmark of many runs takes hours: one that fails is told at once, does not end the others, and is counted."""

    def __init__(self) -> None:
        self._names: list[str] = []

    @contextmanager
    def noted(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            traceback.print_exc()
            print(f"{name} failed; the others go on", flush=True)
            self._names.append(name)

    def end(self) -> None:
        """Ends the program with an error where a run failed."""
        if self._names:
            raise SystemExit(f"{len(self._names)} failed; the same command tries them again: {'; '.join(self._names)}")
