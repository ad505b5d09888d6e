"""One run of many may fail: the others go on, and the exit code tells. runs -> *Failures* -> shell."""

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Failures:
    """What failed in a program of many runs."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def kept(self, name: str) -> Iterator[None]:
        """An error within is shown and noted; Ctrl-C and SIGTERM still end the program."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.found.append(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")

    def tell(self) -> None:
        """To be called last: ends the program with an exit code of 1 if anything failed."""
        if self.found:
            sys.exit("failed:\n  " + "\n  ".join(self.found))
