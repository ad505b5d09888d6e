"""Sends Python objects between two ranks without waiting: what is too small and too mixed for the Transport.

Objects of one sender arrive in the order they were sent, so both ends need no names for them.
"""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pl_pipe.comm.outbox import Outbox
from pl_pipe.comm.transport import CommunicationError

_KEPT = 64  # objects; no receiver is as far behind


class ObjectChannel:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(self, *, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._outbox = Outbox(timeout_s=timeout_s)
        self._sent = 0

    def send(self, content: Any, target: int) -> None:
        """Tensors in it must be on the host."""
        data = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()]), data):
            self._outbox.add(self._sent, dist.isend(part, target, group=self._group), part)
        self._sent += 1
        self._outbox.settle(before=self._sent - _KEPT)

    def receive(self, source: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(dist.irecv(length, source, group=self._group), source)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._wait(dist.irecv(data, source, group=self._group), source)
        return pickle.loads(data.numpy().tobytes())

    def close(self) -> None:
        """Gives the process group back; what is under way is lost."""
        dist.destroy_process_group(self._group)

    def _wait(self, work: Any, source: int) -> None:
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {dist.get_rank()} waited {self._timeout_s:g} s for what rank {source} reports of its step; look "
                f"at rank {source} ({str(error).splitlines()[0]})"
            ) from error
