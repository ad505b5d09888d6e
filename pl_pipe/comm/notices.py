"""Tells receivers what is coming, so that it travels while they compute. DistributedTransport -> *Notices* -> gloo.

gloo moves a message when both sides have asked for it. A stage asks for its next input when the step that needs it
begins, and would then stand still for as long as the message takes:

    without    compute 6 ┤ receive 7 ├ compute 7 ┤ receive 8 ├ …
    with       compute 6 ├ compute 7 ├ …
               receive 7 ┤ receive 8 ┤         on a thread (`pl_pipe.comm.arrivals`) that a notice woke

Gradients have notices too: those of older batches go before the inputs of newer ones. Small messages have none, and
neither have NCCL's.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.followed import EVER
from pl_pipe.comm.interruption import interrupt_group
from pl_pipe.comm.transport import Direction, Message
from pl_pipe.tensors.ghosts import TensorSpec

WORTH_BYTES = 1 << 14
"""Below, the way of a notice takes as long as the message. The same on all ranks."""
_DIMENSIONS = 10
_DIRECTIONS = tuple(Direction)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_CLOSED_WITHIN_S = 10.0


def is_announced(spec: TensorSpec) -> bool:
    """Whether a notice goes ahead of such a message; both sides must know."""
    return spec.size_bytes >= WORTH_BYTES and len(spec.shape) <= _DIMENSIONS and spec.dtype in _DTYPES


class Notices:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(self, come: Callable[[Message, TensorSpec], None], *, timeout: timedelta) -> None:
        """
        Args:
            come: called for each notice, by the thread that took it.
        """
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._come = come
        self._threads: dict[int, threading.Thread] = {}

    def tell(self, message: Message, tensor: Tensor, target: int) -> tuple[Any, Tensor]:
        """A notice to rank `target`, on its way; the buffer must be kept until it has left."""
        shape = tuple(tensor.shape)
        way = _DIRECTIONS.index(message.direction)
        numbers = [message.source, message.target, message.batch, message.number, way, message.exact, message.place]
        padding = [0] * (_DIMENSIONS - len(shape))
        notice = torch.tensor([*numbers, _DTYPES.index(tensor.dtype), len(shape), *shape, *padding], dtype=torch.int64)
        return dist.isend(notice, target, group=self._group), notice

    def listen(self, source: int) -> None:
        """Takes the notices of rank `source` from now on; those that were sent before as well.

        A rank has its own thread: gloo could wait for any rank at once, but nothing would end that.
        """
        if source not in self._threads:
            name = f"pl-pipe-notices-{source}"
            self._threads[source] = threading.Thread(target=self._listen, args=(source,), name=name, daemon=True)
            self._threads[source].start()

    def stop_listening(self) -> None:
        """Nothing more comes."""
        if self._threads:
            self.interrupt()
        for thread in self._threads.values():
            thread.join(_CLOSED_WITHIN_S)

    def interrupt(self) -> None:
        """Ends waits for notices: for those of other ranks, and for this rank's to be taken."""
        interrupt_group(self._group)

    def close(self) -> None:
        """Gives the group back; nobody may wait in it any more."""
        dist.destroy_process_group(self._group)

    def _listen(self, source: int) -> None:
        while True:
            notice = torch.empty(9 + _DIMENSIONS, dtype=torch.int64)
            try:
                work: Any = dist.irecv(notice, source, group=self._group)
                work.wait(EVER)
            except (RuntimeError, ValueError):  # the end of the run, or of a rank: who waits for that one will say so
                return
            stage, target, batch, number, way, exact, place, dtype, dimensions, *shape = notice.tolist()
            message = Message(stage, target, batch, number, _DIRECTIONS[way], bool(exact), place)
            spec = TensorSpec.of(torch.empty(shape[:dimensions], dtype=_DTYPES[dtype], device="meta"))
            self._come(message, spec)
