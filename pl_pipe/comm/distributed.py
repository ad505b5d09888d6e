"""The transport over torch.distributed: isend and irecv, through groups of their own.

With gloo, tags name messages within a pair of ranks, and messages are received ahead of their turn, into buffers of
their own, since their sender told of them (`pl_pipe.comm.notices`). With NCCL there are no tags, and a receive that
waits occupies the device and may keep a send from starting: there, receives are posted when they are needed, which both
sides do in the order of the messages' numbers.
"""

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.arrivals import Arrivals
from pl_pipe.comm.followed import FollowedWork
from pl_pipe.comm.groups import DirectionGroups, Groups, PairGroups
from pl_pipe.comm.listening import MessageListener
from pl_pipe.comm.notices import Notices, is_announced
from pl_pipe.comm.outbox import EmptyingOutbox, Outbox
from pl_pipe.comm.transport import CommunicationError, Direction, Message
from pl_pipe.comm.waiting import Wait, read_as, wait_for
from pl_pipe.tensors.ghosts import TensorSpec

_LOOK_S = 0.0005
_PERHAPS = 64  # hooks whose messages are kept for whoever may still ask for them
_NUMBERS = 1 << 12  # transfers between two stages in one batch
_BATCHES = 1 << 18  # before tags repeat; far more than are ever in flight
_OF_HOOKS = 1 << 30  # tags from here on


class DistributedTransport:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        ranks: Sequence[Sequence[int]] | None = None,
        timeout_s: float = 300.0,
        backend: str = "gloo",
        in_order: bool | None = None,
    ) -> None:
        """
        Args:
            ranks: those of each stage's replicas, which take batches in turns; by default stage s runs on rank s.
            in_order: messages have no tags, and are received in the order in which they are sent; as NCCL wants it.
        """
        self._device = torch.device(device)
        self._ranks = [[rank] for rank in range(dist.get_world_size())] if ranks is None else list(ranks)
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self.in_order = backend == "nccl" if in_order is None else in_order
        self._groups: Groups
        if self.in_order:
            self._groups = PairGroups(self._ranks, backend=backend, timeout=timeout, device=self._device)
        else:
            self._groups = DirectionGroups(backend=backend, timeout=timeout)
        # gloo cannot send CUDA tensors: those go through pinned memory of the host.
        self._through_host = self._device.type != "cpu" and backend == "gloo"
        self._waits_itself = backend != "nccl"  # there the device waits, and the process goes on
        self.listen: MessageListener | None = None
        self.while_waiting: Callable[[int, float], None] | None = None
        """Called again and again with the rank that a message has to come from, and since when it is waited for."""
        self._perhaps: deque[tuple[int, Any]] = deque()
        """By their hooks' numbers."""
        self._outbox = Outbox(timeout_s=timeout_s) if backend == "nccl" else EmptyingOutbox(timeout_s=timeout_s)
        self._arrivals = Arrivals(self._post)
        self._notices: Notices | None = None
        if not self.in_order:
            self._notices = Notices(self._arrivals.noticed, timeout=timeout)

    def send(self, message: Message, tensor: Tensor, *, perhaps: bool = False) -> None:
        source = tensor.detach()
        buffer = _on_host(source) if self._through_host else source.contiguous()
        if buffer.data_ptr() == source.data_ptr():
            buffer = buffer.clone()  # the caller may go on to change it in place
        target, start_s = self._rank(message.target, message), time.perf_counter()
        if self._notices is not None and is_announced(TensorSpec.of(buffer)) and not _goes_back(message):
            notice = self._notices.tell(message, buffer, target)
            if perhaps:
                self._perhaps.append((message.batch, notice))
            else:
                self._outbox.add(message.batch, *notice, target)
        work = dist.isend(buffer, target, group=self._group(message), tag=self._tag(message))
        if perhaps:
            self._perhaps.append((message.batch, (work, buffer)))
            while self._perhaps[0][0] < message.batch - _PERHAPS:
                self._perhaps.popleft()
            return
        if self.listen is not None:
            work = self.listen.sent(work, target, buffer.nbytes, start_s)
        self._outbox.add(message.batch, work, buffer, target)

    def expect(self, message: Message, spec: TensorSpec) -> None:
        if self.in_order:
            return
        has_notice = self._has_notice(message, spec)
        if message.direction is Direction.FORWARD or not has_notice:
            self._arrivals.ask(message, spec, has_notice=has_notice)  # a gradient, however, comes much later

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        work, buffer = self._arrivals.take(message, spec, has_notice=self._has_notice(message, spec))
        if (tuple(buffer.shape), buffer.dtype) != (spec.shape, spec.dtype):
            raise CommunicationError(
                f"{message} was announced as {TensorSpec.of(buffer)} and is received as {spec}: batches of one "
                f"signature took different ways; let the step do the same for all batches of one shape"
            )
        start_s = time.perf_counter()
        awaited = partial(self._wait, message, spec)
        if self.while_waiting is not None:
            work = self._attended(work, self._rank(message.source, message))
        if self._waits_itself:
            wait_for(work, awaited, timeout_s=self._timeout_s)
        else:
            with read_as(awaited, timeout_s=self._timeout_s):
                work.wait()
        self._arrivals.came(message)
        if self.listen is not None:
            self.listen.received(self._rank(message.source, message), buffer.nbytes, start_s)
        return buffer.to(self._device, non_blocking=True) if self._through_host else buffer

    def _attended(self, work: Any, source: int) -> Any:
        assert self.while_waiting is not None
        if not isinstance(work, FollowedWork):
            work = FollowedWork(work)
            threading.Thread(target=work.follow, daemon=True, name="pl-pipe-attended").start()
        begun_s = time.monotonic()
        while not work.is_completed() and time.monotonic() < begun_s + self._timeout_s:
            self.while_waiting(source, begun_s)
            time.sleep(_LOOK_S)
        return work

    def flush(self, *, before: int | None = None) -> None:
        self._outbox.settle(before=before)

    def close(self) -> None:
        """Gives the process groups back; messages under way are lost."""
        if self._notices is not None:
            self._notices.stop_listening()
        self._arrivals.close(self._groups.interrupt)
        if isinstance(self._outbox, EmptyingOutbox):
            self._outbox.clear(self._interrupt)
        else:
            self._outbox.clear()
        if self._notices is not None:
            self._notices.close()
        self._groups.close()

    def _interrupt(self) -> None:
        """Ends waits for messages to be taken, and for notices: a rank that only sends has nobody else to do so."""
        if self._notices is not None:
            self._notices.interrupt()
        self._groups.interrupt()

    def _has_notice(self, message: Message, spec: TensorSpec) -> bool:
        """Whether the sender tells of such a message; that it sends some is reason enough to listen to it."""
        if self._notices is None or not is_announced(spec) or _goes_back(message):
            return False
        self._notices.listen(self._rank(message.source, message))
        return True

    def _post(self, message: Message, spec: TensorSpec) -> tuple[Any, Tensor]:
        buffer = _memory(spec) if self._device.type == "cpu" else self._device_memory(spec)
        source = self._rank(message.source, message)
        with read_as(partial(self._wait, message, spec), timeout_s=self._timeout_s):
            work = dist.irecv(buffer, source, group=self._group(message), tag=self._tag(message))
        return work, buffer

    def _device_memory(self, spec: TensorSpec) -> Tensor:
        if not self._through_host:
            return torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        with torch.cuda.device(self._device):  # a thread begins on device 0, and would make a context there
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=True)

    def _wait(self, message: Message, spec: TensorSpec) -> Wait:
        return Wait(f"stage {message.target}", f"{message} ({spec})", [self._rank(message.source, message)])

    def _rank(self, stage: int, message: Message) -> int:
        replicas = self._ranks[stage]
        return replicas[message.batch % len(replicas)]

    def _tag(self, message: Message) -> int:
        return 0 if self.in_order else _tag(message)

    def _group(self, message: Message) -> Any:
        source, target = self._rank(message.source, message), self._rank(message.target, message)
        return self._groups.between(message.direction, source, target)


def _memory(spec: TensorSpec) -> Tensor:
    """A tensor in memory of the C library. Torch's allocator is slow to use again what one thread takes and another
    gives back, and grows by every message meanwhile."""
    if not spec.size_bytes:  # numpy's empty arrays cannot be seen as another dtype
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.from_numpy(np.empty(spec.size_bytes, dtype=np.uint8)).view(spec.dtype).view(spec.shape)


def _goes_back(message: Message) -> bool:
    """A value for an earlier stage, which waits for it in the middle of its step: there is nothing to be ahead of."""
    return message.direction is Direction.FORWARD and message.source > message.target


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, which the device writes itself."""
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    buffer.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return buffer


def _tag(message: Message) -> int:
    if message.number >= _NUMBERS and not message.place:
        raise CommunicationError(
            f"{message}: more than {_NUMBERS} transfers between two stages in one batch; cut the model elsewhere"
        )
    if message.place:
        name = f"{message.batch} {message.place} {message.number}"
        return _OF_HOOKS + zlib.crc32(name.encode()) % _OF_HOOKS
    return message.batch % _BATCHES * _NUMBERS + message.number
