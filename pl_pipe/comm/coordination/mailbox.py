"""Boxes that messages are put into and taken out of, by name. coordinator, clients -> *Mailbox* -> the group's store.

Taking waits in the kernel until something is there: nobody polls. A connection serves one wait at a time, so every
thread that waits has a mailbox of its own.
"""

import queue
import threading
from typing import Any, Protocol

import torch.distributed as dist

from pl_pipe.comm.followed import EVER


class Mailbox(Protocol):
    """One thread's end."""

    def put(self, box: str, message: bytes) -> None: ...

    def take(self, box: str) -> bytes:
        """The oldest message; waits for one."""

    def another(self) -> "Mailbox":
        """For another thread."""


class StoreMailbox:
    """Queues of the store that the ranks of the default process group have met through; rank 0 keeps it."""

    def __init__(self, name: str, store: Any | None = None) -> None:
        """
        Args:
            name: the same on all ranks, and another one for each run.
        """
        self._name = name
        found: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._store: Any = found.clone()
        self._store.set_timeout(EVER)  # how long is too long, the lifelines know
        self._boxes: Any = dist.distributed_c10d.PrefixStore(name, self._store)

    def put(self, box: str, message: bytes) -> None:
        self._boxes.queue_push(box, message)

    def take(self, box: str) -> bytes:
        found: bytes = self._boxes.queue_pop(box)
        return found

    def another(self) -> "StoreMailbox":
        return StoreMailbox(self._name, self._store)


class LocalMailbox:
    """Workers as threads of one process: the double, for tests and trials."""

    def __init__(self) -> None:
        self._boxes: dict[str, queue.SimpleQueue[bytes]] = {}
        self._lock = threading.Lock()

    def put(self, box: str, message: bytes) -> None:
        self._box(box).put(message)

    def take(self, box: str) -> bytes:
        return self._box(box).get(timeout=60.0)

    def another(self) -> "LocalMailbox":
        return self

    def _box(self, box: str) -> "queue.SimpleQueue[bytes]":
        with self._lock:
            return self._boxes.setdefault(box, queue.SimpleQueue())
