"""What is said of tracebacks: all of a cause, a line of what only follows from it. output -> *consequences* -> user.

torchrun takes the end of a rank for an error of its own, and shows where in torchrun it was noticed; ranks that lose
another one show where they waited for it. The files of the hosts have it all.

    Traceback (most recent call last):                       a cause: said as it is
      File "train.py", line 3, in <module>
    ValueError: …
    Traceback (most recent call last):                       torchrun's: "rank 1 ended with exit code 1"
      File ".../torch/distributed/run.py", line 887
    torch.distributed.elastic.….ChildFailedError:
    ============ … exitcode  : 1 (pid: 4711) … ============
    Traceback (most recent call last):                       a lost peer: the last line
      …
    RuntimeError: [gloo/…] Connection closed by peer
"""

import re
import signal
import threading
from collections.abc import Callable

_RANK = re.compile(r"^\[rank\d+\]: ?")
_BEGINS = re.compile(r"Traceback \(most recent call last\)")
_GOES_ON = re.compile(r"\s|$|During handling of the above|The above exception was the direct|Traceback ")
_TORCHRUNS = re.compile(r"torch\.distributed\.elastic\.")
_PEERS = re.compile(r"closed by peer|reset by peer|pair closure|DistNetworkError|Broken pipe|torch\.distributed\.Dist")
_WARNS = re.compile(r"[WE]\d+ .*torch/distributed/elastic/")
_RULE = re.compile(r"=+$")
_REPORTED = re.compile(r"\s+(rank|exitcode)\s*: (-?\d+)")


class Shortened:
    """Lines on their way to the user."""

    def __init__(self, say: Callable[[str], None], stopping: threading.Event) -> None:
        """
        Args:
            stopping: set when the user wants it to end: then no traceback is of interest.
        """
        self._say, self._stopping = say, stopping
        self._traceback: list[str] = []
        self._rules_to_come = 0
        """Of torchrun's report on its ranks, which stands between two."""
        self._rank = "?"

    def add(self, line: str) -> None:
        if self._rules_to_come:
            self._add_reported(line)
        elif self._traceback or _BEGINS.match(_RANK.sub("", line)):
            self._add_traced(line)
        elif not (self._stopping.is_set() and _WARNS.match(line)):
            self._say(line)

    def end(self) -> None:
        """Nothing follows."""
        self._let_go(self._traceback)

    def _add_traced(self, line: str) -> None:
        self._traceback.append(line)
        words = _RANK.sub("", line)
        if _GOES_ON.match(words):
            return
        if _TORCHRUNS.match(words) and ("ChildFailedError" in line or "SignalException" in line):
            self._rules_to_come = 2 if "ChildFailedError" in line else 0
            self._traceback.clear()
        elif _TORCHRUNS.match(words) or _PEERS.search(line):
            self._let_go([line])
        else:
            self._let_go(self._traceback)

    def _let_go(self, lines: list[str]) -> None:
        for line in lines if not self._stopping.is_set() else ():
            self._say(line)
        self._traceback.clear()

    def _add_reported(self, line: str) -> None:
        if _RULE.match(line):
            self._rules_to_come -= 1
        elif found := _REPORTED.match(line):
            if found[1] == "rank":
                self._rank = found[2]
            elif not self._stopping.is_set():
                self._say(f"rank {self._rank} {ended(int(found[2]))}")


def ended(code: int) -> str:
    """How a process has ended, by its exit code as Python has it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"
