"""Sends and receives that a thread waits for. threads -> *FollowedWork* -> whoever wants to know.

gloo tells that a message has left, or come, only to one who waits for it, and only once. A thread that waits passes it
on to any number of others.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

_SOON_S, _ENDS_S = 0.05, 10.0
EVER = timedelta(days=1000)  # gloo closes a group in which a wait took too long: how long is too long, others say


class FollowedWork:
    """A work of torch.distributed as others know it: something to wait for."""

    def __init__(self, work: Any, on_end: Callable[[float], None] | None = None) -> None:
        """
        Args:
            on_end: told the time at which the work had ended, unless it failed.
        """
        self._work, self._on_end = work, on_end
        self._over = threading.Event()
        self._error: Exception | None = None

    def follow(self) -> None:
        """To be called by the thread that waits."""
        try:
            self._work.wait(EVER)
            if self._on_end is not None:
                self._on_end(time.perf_counter())
        except Exception as error:  # it is the waiting rank's to deal with
            self._error = error
        self._work = None  # it has the message's memory
        self._over.set()

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out waiting {timeout.total_seconds():g} s for a message")
        if self._error is not None:
            raise self._error


def end_threads(threads: Sequence[threading.Thread], interrupt: Callable[[], None]) -> None:
    """Waits for threads that were told to end; those that wait for another rank are interrupted."""
    for thread in threads:
        thread.join(_SOON_S)
    if any(thread.is_alive() for thread in threads):
        interrupt()
    for thread in threads:
        thread.join(_ENDS_S)
