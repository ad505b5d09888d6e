"""The hosts' output on one terminal, and each host's in its file. launcher -> *host output* -> user."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Generic, TypeVar

from pl_pipe.lab.consequences import Shortened

_PROGRESS_EVERY_S = 2.0
_ENDS = re.compile(rb"[\r\n]")
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-HJK]")
# Said by every rank of every lab, since its hosts have addresses and no names; the file has it.
Words = TypeVar("Words")
_NOISE = ("The hostname of the client socket cannot be retrieved", "Expected number of connected peer ranks is")


def copy_output(
    source: IO[bytes], path: Path, prefix: str, say: Callable[[str], None], stopping: threading.Event
) -> None:
    """Says each line with the host's name; of a progress bar, which rewrites its line, one state now and then.

    Tracebacks of what only follows from another's end, or from being asked to stop, are kept in the file alone. What
    the host says is read to its end, even where the terminal has gone or the disk is full: it would stand still.
    """
    unfinished = b""
    said_s = -_PROGRESS_EVERY_S
    said: _UntilItFails[str] = _UntilItFails(lambda text: say(prefix + text))
    shortened = Shortened(said, stopping)
    with ExitStack() as stack:
        kept: _UntilItFails[bytes] = _UntilItFails(
            _writing(path, stack), lambda error: said(f"{path} is not written on: {error}")
        )
        kept(b"")  # the file of a host that says nothing is empty
        while chunk := source.read1(1 << 16):  # type: ignore[attr-defined]
            kept(chunk)
            unfinished += chunk
            while found := _ENDS.search(unfinished):
                line, unfinished = unfinished[: found.start()], unfinished[found.end() :]
                passing = found[0] == b"\r"
                if passing and time.monotonic() - said_s < _PROGRESS_EVERY_S:
                    continue
                if (text := _text(line)) is not None:
                    shortened.add(text)
                    if passing:
                        said_s = time.monotonic()
        if (text := _text(unfinished)) is not None:
            shortened.add(text)
        shortened.end()


class _UntilItFails(Generic[Words]):
    """Passes words on, until that fails once."""

    def __init__(
        self, tell: Callable[[Words], object], on_failure: Callable[[BaseException], object] = lambda _: None
    ) -> None:
        self._tell, self._on_failure, self._works = tell, on_failure, True

    def __call__(self, words: Words) -> None:
        if not self._works:
            return
        try:
            self._tell(words)
        except (Exception, SystemExit) as error:  # the second is rich's, for a pipe that nobody reads
            self._works = False
            self._on_failure(error)


def _writing(path: Path, stack: ExitStack) -> Callable[[bytes], None]:
    opened: list[IO[bytes]] = []

    def write(chunk: bytes) -> None:
        if not opened:
            opened.append(stack.enter_context(path.open("wb", buffering=0)))
        opened[0].write(chunk)

    return write


def _text(line: bytes) -> str | None:
    """What there is to say of a line, if anything."""
    text = _CURSOR.sub("", line.decode(errors="replace")).rstrip()
    return None if not text or any(words in text for words in _NOISE) else text
