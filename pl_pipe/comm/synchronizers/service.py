"""Workers that answer others while they compute: for each other worker a thread. calls -> *TensorService* -> handler.

A call is a request with numbers and an answer with numbers. The threads never call anyone themselves, and so a caller
waits for no more than what a handler does: no circle of workers that wait for each other can come about.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_pipe.comm.followed import EVER, end_threads
from pl_pipe.comm.interruption import is_about_peers
from pl_pipe.comm.peers import Peers
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.comm.waiting import Wait, read_as, wait_for
from pl_pipe.errors import StageError
from pl_pipe.log import get_logger

log = get_logger(__name__)

_END, _FAILED = -1, -2
_ASK, _ANSWER = 1, 2  # tags: what goes to a service, what comes from one


class Handler(Protocol):
    """What a worker does for others."""

    def handle(self, source: int, operation: int, numbers: Tensor) -> Tensor:
        """By a thread of that source's own; the answer is sent back."""

    def gone(self, source: int) -> None:
        """The source will call no more: it has ended, or died in the middle of something."""


class TensorService:
    """One rank's calls and answers, over a group of its own; all peers must make theirs at the same point."""

    def __init__(self, handler: Handler, peers: Peers, *, dtype: torch.dtype, timeout_s: float = 300.0) -> None:
        self.rank = peers.rank
        self.others = [rank for rank in peers.ranks if rank != self.rank]
        self._handler, self._dtype, self._timeout_s = handler, dtype, timeout_s
        self._peers = peers
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, args=(source,), daemon=True, name=f"service-{source}")
            for source in self.others
        ]
        for thread in self._threads:
            thread.start()

    def call(self, target: int, operation: int, numbers: Tensor | None = None) -> Tensor:
        """One call at a time to each target.

        Raises:
            CommunicationError: it does not answer, as it will have ended.
            StageError: it lives, and what was asked for failed there.
        """
        if target == self.rank:
            return self._handler.handle(self.rank, operation, self._empty(0) if numbers is None else numbers)
        describe = partial(self._wait, target)
        works = self._sent(operation, numbers, target, _ASK, describe)
        with read_as(describe, timeout_s=self._timeout_s):
            answer = self._received(target, _ANSWER, lambda work: wait_for(work, describe, timeout_s=self._timeout_s))
        for work in works:
            wait_for(work, describe, timeout_s=self._timeout_s)
        if answer[0] == _FAILED:
            raise StageError(f"rank {target} could not do what rank {self.rank} asked it for; its log says why")
        return answer[1]

    def interrupt(self) -> None:
        self._peers.interrupt()

    def close(self) -> None:
        """Tells the others' threads that this rank calls no more; its own end when the others have told so."""
        self._closing = True
        for target in self.others:
            try:
                for work in self._sent(_END, None, target, _ASK, partial(self._wait, target)):
                    work.wait(timedelta(seconds=self._timeout_s))
            except (CommunicationError, RuntimeError):
                continue  # it has ended
        for thread in self._threads:
            thread.join(self._timeout_s)
        end_threads(self._threads, self.interrupt)
        self._peers.close()

    def _serve(self, source: int) -> None:
        try:
            while True:
                operation, numbers = self._received(source, _ASK, lambda work: work.wait(EVER))
                if operation == _END:
                    return
                kind, answer = self._handled(source, operation, numbers)
                for work in self._sent(kind, answer, source, _ANSWER, partial(self._wait, source)):
                    work.wait(EVER)
        except Exception as error:
            if not isinstance(error, CommunicationError) and not is_about_peers(error):
                log.error("rank %d can no longer answer rank %d", self.rank, source, exc_info=error)
        finally:
            self._handler.gone(source)

    def _handled(self, source: int, operation: int, numbers: Tensor) -> tuple[int, Tensor | None]:
        """What failed here ends the caller, which would wait in vain for an answer."""
        try:
            return 0, self._handler.handle(source, operation, numbers)
        except Exception as error:
            log.error("rank %d could not do what rank %d asked it for", self.rank, source, exc_info=error)
            return _FAILED, None

    def _sent(
        self, operation: int, numbers: Tensor | None, target: int, tag: int, describe: Callable[[], Wait]
    ) -> list[Any]:
        head = torch.tensor([operation, 0 if numbers is None else numbers.numel()])
        with read_as(describe, timeout_s=self._timeout_s):
            works = [_Kept(self._peers.isend(head, target, tag), head)]
            if numbers is not None and numbers.numel():
                works.append(_Kept(self._peers.isend(numbers, target, tag), numbers))
        return works

    def _received(self, source: int, tag: int, wait: Callable[[Any], None]) -> tuple[int, Tensor]:
        head = torch.zeros(2, dtype=torch.int64)
        wait(self._peers.irecv(head, source, tag))
        operation, numel = head.tolist()
        numbers = self._empty(numel)
        if numel:
            wait(self._peers.irecv(numbers, source, tag))
        return operation, numbers

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._dtype)

    def _wait(self, target: int) -> Wait:
        return Wait(f"rank {self.rank}", f"the answer of rank {target}", [target])


class _Kept:
    """A send, with what it sends: that must live as long."""

    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self, timeout: timedelta) -> None:
        self._work.wait(timeout)
