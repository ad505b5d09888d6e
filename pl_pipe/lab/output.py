"""The hosts' output on one terminal, and each host's in its file. launcher -> *host output* -> user."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

_PROGRESS_EVERY_S = 2.0
_ENDS = re.compile(rb"[\r\n]")
_CURSOR = re.compile(r"\x1b\[[0-9;]*[A-HJK]")
# Said by every rank of every lab, since its hosts have addresses and no names; the file has it.
_NOISE = ("The hostname of the client socket cannot be retrieved", "Expected number of connected peer ranks is")
# What torchrun says of itself when it is asked to end.
_FAREWELL = re.compile(r"Traceback \(most recent call last\)|W\d+ .*torch/distributed/elastic/")


def copy_output(
    source: IO[bytes], path: Path, prefix: str, say: Callable[[str], None], stopping: threading.Event
) -> None:
    """Says each line with the host's name; of a progress bar, which rewrites its line, one state now and then.

    Of a host that was asked to stop, tracebacks are kept in the file alone: torchrun takes its end for an error.
    """
    unfinished = b""
    traced = False
    said_s = -_PROGRESS_EVERY_S
    with path.open("wb") as kept:
        while chunk := source.read1(1 << 16):  # type: ignore[attr-defined]
            kept.write(chunk)
            kept.flush()
            unfinished += chunk
            while found := _ENDS.search(unfinished):
                line, unfinished = unfinished[: found.start()], unfinished[found.end() :]
                passing = found[0] == b"\r"
                farewell = _FAREWELL.search(line.decode(errors="replace")) if stopping.is_set() else None
                traced = traced or (farewell is not None and farewell[0].startswith("Traceback"))
                if traced or farewell:
                    continue
                if passing and time.monotonic() - said_s < _PROGRESS_EVERY_S:
                    continue
                if _say_line(line, prefix, say) and passing:
                    said_s = time.monotonic()
        if not traced:
            _say_line(unfinished, prefix, say)


def _say_line(line: bytes, prefix: str, say: Callable[[str], None]) -> bool:
    text = _CURSOR.sub("", line.decode(errors="replace")).rstrip()
    if not text or any(words in text for words in _NOISE):
        return False
    say(prefix + text)
    return True
