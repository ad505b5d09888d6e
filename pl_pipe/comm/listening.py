"""Who is told of the messages of a rank, and how it learns when one has left. transport -> *listening* -> recorder."""

import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from pl_pipe.errors import StageError


class MessageListener(Protocol):
    """Told by a transport of what it sends and receives; times are `time.perf_counter`'s."""

    def sent(self, work: Any, peer: int, size_bytes: int, start_s: float) -> Any:
        """A message is on its way to rank `peer` since `start_s`; what this returns stands for `work` from now on."""

    def received(self, peer: int, size_bytes: int, start_s: float) -> None:
        """A message of rank `peer` is here, which was waited for since `start_s`."""


class SendWatch:
    """Waits for sends on a thread of its own, in their order: gloo tells that one has left only to who waits for it,
    and only once."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[WatchedSend | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pl-pipe-sends", daemon=True)
        self._thread.start()

    def watch(self, work: Any, on_left: Callable[[float], None]) -> "WatchedSend":
        """The work in another form; `on_left` gets the time at which the message had left."""
        watched = WatchedSend(work, on_left)
        self._queue.put(watched)
        return watched

    def close(self, *, timeout_s: float) -> None:
        """Waits until all that was watched has left."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (watched := self._queue.get()) is not None:
            watched.follow()


class WatchedSend:
    """A send as the transport knows it: something to wait for."""

    def __init__(self, work: Any, on_left: Callable[[float], None]) -> None:
        self._work, self._on_left = work, on_left
        self._over = threading.Event()
        self._error: Exception | None = None

    def follow(self) -> None:
        try:
            self._work.wait()
            self._on_left(time.perf_counter())
        except Exception as error:  # it is the waiting rank's to deal with
            self._error = error
        self._over.set()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._over.wait(timeout.total_seconds()):
            raise StageError(f"a message has not left within {timeout.total_seconds():g} s; look at its receiver")
        if self._error is not None:
            raise self._error
