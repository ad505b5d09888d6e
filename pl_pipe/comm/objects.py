"""Sends Python objects between two ranks without waiting: what is too small and too mixed for the Transport.

Objects of one sender arrive in the order they were sent, so both ends need no names for them.
"""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.outbox import Outbox
from pl_pipe.comm.waiting import Wait, read_as, wait_for

_KEPT = 64  # objects; no receiver is as far behind


class ObjectChannel:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(self, *, timeout_s: float = 300.0, called: str = "what rank {} reports of its step") -> None:
        """`called` says in errors what is waited for, and from which rank."""
        self._timeout_s, self._called = timeout_s, called
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._outbox = Outbox(timeout_s=timeout_s)
        self._sent = 0

    def send(self, content: Any, target: int) -> None:
        """Tensors in it must be on the host."""
        self.send_bytes(pickle.dumps(content), target)

    def send_bytes(self, content: bytes, target: int) -> None:
        """What has been pickled already."""
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        for part in (torch.tensor([data.numel()]), data):
            self._outbox.add(self._sent, dist.isend(part, target, group=self._group), part, target)
        self._sent += 1
        self._outbox.settle(before=self._sent - _KEPT)

    def receive(self, source: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._receive(data, source)
        return pickle.loads(data.numpy().tobytes())

    def close(self) -> None:
        """Gives the process group back; what is under way is lost."""
        self._outbox.clear()
        dist.destroy_process_group(self._group)
        self._group = None

    def _receive(self, buffer: Tensor, source: int) -> None:
        def content() -> Wait:
            return Wait(f"rank {dist.get_rank()}", self._called.format(source), [source])

        with read_as(content, timeout_s=self._timeout_s):
            work = dist.irecv(buffer, source, group=self._group)
        wait_for(work, content, timeout_s=self._timeout_s)
