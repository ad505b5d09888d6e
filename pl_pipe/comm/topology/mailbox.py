"""The port through which sums send and receive pieces. summing -> *Mailbox* -> other ranks."""

import queue
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.interruption import interrupt_group
from pl_pipe.comm.summing import Pending
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.comm.waiting import Wait, read_as, wait_for


class Mailbox(Protocol):
    """One rank's end. Ranks are numbered within those that sum together."""

    @property
    def rank(self) -> int: ...

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Begins at once and waits for nobody; the tensor must be left alone until it has left."""

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        """Begins at once; the buffer has the content when the wait is over."""

    def interrupt(self) -> None:
        """Ends waits that nothing else would end."""


class DistributedMailbox:
    """Over a gloo group of torch.distributed, in which nothing else sends messages."""

    def __init__(self, group: Any, ranks: Sequence[int], *, timeout_s: float) -> None:
        """
        Args:
            ranks: those of the whole run that make up the group.
        """
        self._group, self._ranks, self._timeout_s = group, list(ranks), timeout_s
        self.rank = self._ranks.index(dist.get_rank())

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._begun(dist.isend, tensor, peer, tag, "a part of a sum to be taken")

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        return self._begun(dist.irecv, buffer, peer, tag, "a part of a sum")

    def interrupt(self) -> None:
        interrupt_group(self._group)

    def _begun(self, begin: Any, tensor: Tensor, peer: int, tag: int, what: str) -> Pending:
        def describe() -> Wait:
            return Wait(f"rank {self._ranks[self.rank]}", what, [self._ranks[peer]])

        with read_as(describe, timeout_s=self._timeout_s):
            work = begin(tensor, self._ranks[peer], group=self._group, tag=tag)
        return _DistributedMessage(work, describe, self._timeout_s)


class _DistributedMessage:
    def __init__(self, work: Any, describe: Any, timeout_s: float) -> None:
        self._work, self._describe, self._timeout_s = work, describe, timeout_s

    def wait(self) -> None:
        wait_for(self._work, self._describe, timeout_s=self._timeout_s)


class LocalMailboxes:
    """Ranks as threads of one process: the double, for tests and trials."""

    def __init__(self, ranks: int, *, timeout_s: float = 20.0) -> None:
        self.ranks, self.timeout_s = ranks, timeout_s
        self._boxes: dict[tuple[int, int, int], queue.Queue[Tensor]] = {}
        self._lock = threading.Lock()
        self.sent_bytes = [0] * ranks

    def of(self, rank: int) -> "LocalMailbox":
        return LocalMailbox(self, rank)

    def box(self, source: int, target: int, tag: int) -> "queue.Queue[Tensor]":
        with self._lock:
            return self._boxes.setdefault((source, target, tag), queue.Queue())

    def unread(self) -> int:
        with self._lock:
            return sum(box.qsize() for box in self._boxes.values())


class LocalMailbox:
    """One rank's end of LocalMailboxes."""

    def __init__(self, boxes: LocalMailboxes, rank: int) -> None:
        self._boxes, self.rank = boxes, rank

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._boxes.sent_bytes[self.rank] += tensor.nbytes
        self._boxes.box(self.rank, peer, tag).put(tensor.clone())
        return _Sent()

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        return _Awaited(self._boxes, (peer, self.rank, tag), buffer)

    def interrupt(self) -> None:
        """Waits end by themselves."""


class _Sent:
    def wait(self) -> None:
        """It has been copied."""


class _Awaited:
    def __init__(self, boxes: LocalMailboxes, message: tuple[int, int, int], buffer: Tensor) -> None:
        self._boxes, self._message, self._buffer = boxes, message, buffer

    def wait(self) -> None:
        try:
            self._buffer.copy_(self._boxes.box(*self._message).get(timeout=self._boxes.timeout_s))
        except queue.Empty:
            source, target, _ = self._message
            raise CommunicationError(f"rank {target} waited in vain for a part of a sum of rank {source}") from None
