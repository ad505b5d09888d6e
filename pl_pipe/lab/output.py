"""The hosts' output on one terminal, and each host's in its file. launcher -> *host output* -> user."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pl_pipe.lab.consequences import Shortened

_PROGRESS_EVERY_S = 2.0
_ENDS = re.compile(rb"[\r\n]")
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-HJK]")
# Said by every rank of every lab, since its hosts have addresses and no names; the file has it.
_NOISE = ("The hostname of the client socket cannot be retrieved", "Expected number of connected peer ranks is")


def copy_output(
    source: IO[bytes], path: Path, prefix: str, say: Callable[[str], None], stopping: threading.Event
) -> None:
    """Says each line with the host's name; of a progress bar, which rewrites its line, one state now and then.

    Tracebacks of what only follows from another's end, or from being asked to stop, are kept in the file alone.
    """
    unfinished = b""
    said_s = -_PROGRESS_EVERY_S
    shortened = Shortened(lambda text: say(prefix + text), stopping)
    with path.open("wb") as kept:
        while chunk := source.read1(1 << 16):  # type: ignore[attr-defined]
            kept.write(chunk)
            kept.flush()
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


def _text(line: bytes) -> str | None:
    """What there is to say of a line, if anything."""
    text = _CURSOR.sub("", line.decode(errors="replace")).rstrip()
    return None if not text or any(words in text for words in _NOISE) else text
