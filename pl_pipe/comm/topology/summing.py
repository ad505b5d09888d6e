"""Sums over a topology, on a thread, while the caller computes. strategy, gradient averaging -> *TopologySumming*.

start(bucket 0), start(bucket 1) … ─► thread: one sum after the other, on all ranks in the same order
switch(topology)                      between sums only: what is under way keeps the way it began on
"""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_pipe.comm.followed import end_threads
from pl_pipe.comm.summing import Pending, Summing
from pl_pipe.comm.topology.mailbox import Mailbox
from pl_pipe.comm.topology.pieces import PieceSum, SpareBuffers
from pl_pipe.comm.topology.rounds import Transfer, compile_rounds
from pl_pipe.comm.topology.traffic import TrafficWatch, WatchedMailbox
from pl_pipe.comm.topology.trees import Topology
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.errors import ConfigError

PIECE_BYTES = 2 << 20
_SUMS, _MESSAGES = 1 << 10, 1 << 20  # before tags repeat, and of one sum
_PIECES = 1 << 10  # of one tensor

Ended = Callable[[Exception | None], None]


class TopologySumming:
    """One rank's end of the Summing port. Ranks must start the same sums in the same order, and switch between them."""

    def __init__(
        self,
        topology: Topology,
        mailbox: Mailbox,
        *,
        native: Summing | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """
        Args:
            native: for the topology of that name.
            piece_bytes: of what travels at a time over a topology of one tree. Where there are several, each has its
                share of the tensor, all are on their way together, and so many times larger pieces keep links busy.
        """
        self._mailbox, self._native, self._piece_bytes = mailbox, native, piece_bytes
        self._topology = topology
        self._buffers = SpareBuffers()
        self._orders: queue.SimpleQueue[tuple[Tensor, Topology, int, _Pending] | None] = queue.SimpleQueue()
        self._started = self._ended = 0
        self._failure: Exception | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self.watch: TrafficWatch | None = None
        """Told how long messages were in flight, if set; on all ranks alike, between sums."""
        self.switch(topology)

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def is_idle(self) -> bool:
        return self._started == self._ended

    def switch(self, topology: Topology) -> None:
        """From the next sum on."""
        if topology.is_native and self._native is None:
            raise ConfigError("topology=native needs a process group, and here is none; choose another topology")
        if not self.is_idle:
            raise CommunicationError("a topology can be changed between sums only, and one is under way")
        self._topology = topology

    def start(self, tensor: Tensor, on_end: Ended | None = None) -> Pending:
        """The tensor will hold the sum. `on_end` is called by the thread, with the error if there was one."""
        if self._topology.is_native and on_end is None:
            assert self._native is not None
            return self._native.start(tensor)
        if self._closed:
            raise CommunicationError("a sum was started after the ranks had parted; start none after the training")
        pending = _Pending(on_end)
        self._started += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pl-pipe-sums", daemon=True)
            self._thread.start()
        ready = _recorded(tensor)
        self._orders.put((tensor, self._topology, self._started, pending.after(ready)))
        return pending

    def close(self) -> None:
        """Ends the thread; sums that are under way fail."""
        self._closed = True
        self._orders.put(None)
        if self._thread is not None:
            end_threads([self._thread], self._mailbox.interrupt)
        if self.watch is not None:
            self.watch.close()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            tensor, topology, number, pending = order
            try:
                if self._failure is not None:
                    raise self._failure
                pending.wait_until_ready()
                self._sum(tensor, topology, number)
            except Exception as error:  # it is the waiting rank's to deal with
                self._failure = error
            self._ended += 1
            pending.end(self._failure)

    @torch.no_grad()
    def _sum(self, tensor: Tensor, topology: Topology, number: int) -> None:
        if topology.is_native:
            assert self._native is not None
            self._native.start(tensor).wait()
            return
        if not tensor.numel() or topology.ranks == 1:
            return
        flat = tensor.detach().reshape(-1)  # a copy where the tensor is not contiguous
        here = flat if flat.device.type == "cpu" else flat.cpu()
        most = max(self._piece_bytes * len(topology.trees) // here.itemsize, -(-here.numel() // _PIECES), 1)
        programs = compile_rounds(topology, here.numel(), most_elements=most)
        mailbox: Any = self._mailbox if self.watch is None else WatchedMailbox(self._mailbox, self.watch)
        PieceSum(here, programs[self._mailbox.rank], mailbox, self._buffers, _Tags(number)).run()
        if self.watch is not None:
            mailbox.finish(tag=_tag(number, _MESSAGES - 1))
        if here.data_ptr() != tensor.data_ptr():
            tensor.copy_(here.view(tensor.shape))
            if tensor.device.type == "cuda":
                torch.cuda.current_stream(tensor.device).synchronize()


class _Tags:
    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(self, transfer: Transfer) -> int:
        return _tag(self._number, transfer.number)


def _tag(number: int, message: int) -> int:
    return (number % _SUMS) * _MESSAGES + message % _MESSAGES


def _recorded(tensor: Tensor) -> Any:
    """On a GPU the tensor's content may be computed still when this is called."""
    if tensor.device.type != "cuda":
        return None
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class _Pending:
    def __init__(self, on_end: Ended | None) -> None:
        self._on_end = on_end
        self._over = threading.Event()
        self._error: Exception | None = None
        self._ready: Any = None

    def after(self, ready: Any) -> "_Pending":
        self._ready = ready
        return self

    def wait_until_ready(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._over.set()
        if self._on_end is not None:
            self._on_end(error)

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error
