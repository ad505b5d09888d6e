"""Messages on their way out: kept until they have left. transports -> *Outbox* -> torch.distributed.

A send's buffer must not be freed before the message has left, and gloo says that it has only to one who waits for it.
So an outbox waits, for messages that are so old that their receivers are known to have come by: nobody stands still
for that, and what is kept stays bounded.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.followed import FollowedWork, end_threads
from pl_pipe.comm.waiting import Wait, wait_for


class Outbox:
    """Sends, with numbers which may be those of batches; they are waited for in the order in which they were added.

    Numbers may fall back: gradients of earlier batches leave among the activations of later ones.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sending: deque[tuple[int, Any, Tensor, int]] = deque()

    def __len__(self) -> int:
        return len(self._sending)

    def add(self, number: int, work: Any, buffer: Tensor, target: int) -> None:
        self._sending.append((number, work, buffer, target))

    def clear(self) -> None:
        """Lets go of all messages, whether they have left or not."""
        self._sending.clear()

    def settle(self, *, before: int | None = None) -> None:
        """Waits for all messages, or up to the first whose number is not less than `before`, and lets go of them."""
        while self._sending and (before is None or self._sending[0][0] < before):
            _, work, _, target = self._sending.popleft()
            wait_for(work, partial(_leaving, target), timeout_s=self._timeout_s)


class EmptyingOutbox:
    """An outbox that lets go of messages as they leave: for each receiver a thread waits for them."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._added = itertools.count()
        self._sending: dict[int, tuple[int, FollowedWork, int]] = {}
        self._queues: dict[int, queue.SimpleQueue[tuple[int, FollowedWork, Tensor] | None]] = {}
        self._threads: list[threading.Thread] = []

    def __len__(self) -> int:
        return len(self._sending)

    def add(self, number: int, work: Any, buffer: Tensor, target: int) -> None:
        if target not in self._queues:
            self._queues[target] = queue.SimpleQueue()
            name = f"pl-pipe-sends-{target}"
            thread = threading.Thread(target=self._empty, args=(self._queues[target],), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        place, followed = next(self._added), FollowedWork(work)
        self._sending[place] = number, followed, target
        self._queues[target].put((place, followed, buffer))

    def clear(self, interrupt: Callable[[], None]) -> None:
        """Lets go of all messages, whether they have left or not; `interrupt` ends waits for those that have not."""
        for waiting in self._queues.values():
            waiting.put(None)
        end_threads(self._threads, interrupt)
        self._sending.clear()

    def settle(self, *, before: int | None = None) -> None:
        """As an Outbox does: waits up to the first message whose number is not less than `before`."""
        for place in list(self._sending):
            number, followed, target = self._sending.get(place, (None, None, None))
            if number is None or followed is None or target is None:
                continue  # it has left by now
            if before is not None and number >= before:
                return
            wait_for(followed, partial(_leaving, target), timeout_s=self._timeout_s)

    def _empty(self, waiting: "queue.SimpleQueue[tuple[int, FollowedWork, Tensor] | None]") -> None:
        while (sent := waiting.get()) is not None:
            place, followed, _ = sent
            followed.follow()
            if not followed.has_failed:
                self._sending.pop(place, None)
            del sent, followed, _  # or the last message would stay until the next one


def _leaving(target: int) -> Wait:
    return Wait(f"rank {dist.get_rank()}", f"rank {target} to take a message", [target])
