"""Who is told of the messages of a rank, and how it learns when one has left. transport -> *listening* -> recorder."""

import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

from pl_pipe.comm.followed import FollowedWork


class MessageListener(Protocol):
    """Told by a transport of what it sends and receives; times are `time.perf_counter`'s."""

    def sent(self, work: Any, peer: int, size_bytes: int, start_s: float) -> Any:
        """A message is on its way to rank `peer` since `start_s`; what this returns stands for `work` from now on."""

    def received(self, peer: int, size_bytes: int, start_s: float) -> None:
        """A message of rank `peer` is here, which was waited for since `start_s`."""


class SendWatch:
    """Waits for sends on a thread of its own, in their order."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[FollowedWork | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pl-pipe-sends", daemon=True)
        self._thread.start()

    def watch(self, work: Any, on_left: Callable[[float], None]) -> FollowedWork:
        """The work in another form; `on_left` gets the time at which the message had left."""
        watched = FollowedWork(work, on_left)
        self._queue.put(watched)
        return watched

    def close(self, *, timeout_s: float) -> None:
        """Waits until all that was watched has left."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (watched := self._queue.get()) is not None:
            watched.follow()
