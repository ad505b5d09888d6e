"""The transport over torch.distributed: isend and irecv, one process group a direction.

Gradients must not wait behind activations, so the directions have groups of their own. Tags name messages within a pair
of ranks; receives that were announced are posted at once, into buffers of their own.
"""

import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.listening import MessageListener
from pl_pipe.comm.transport import CommunicationError, Direction, Message
from pl_pipe.tensors.ghosts import TensorSpec

_NUMBERS = 1 << 12  # transfers between two stages in one batch
_BATCHES = 1 << 18  # before tags repeat; far more than are ever in flight


class DistributedTransport:
    """One rank's end; all ranks of the default process group must make theirs at the same point."""

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        ranks: Sequence[int] | None = None,
        timeout_s: float = 300.0,
        backend: str = "gloo",
    ) -> None:
        """`ranks` are the stages' ranks, by stage; by default stage s runs on rank s."""
        self._device = torch.device(device)
        self._ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        self._groups: dict[Direction, Any] = {
            direction: dist.new_group(backend=backend, timeout=timeout) for direction in Direction
        }
        # gloo cannot send CUDA tensors: those go through pinned memory of the host.
        self._through_host = self._device.type != "cpu" and backend == "gloo"
        self.listen: MessageListener | None = None
        self._sending: deque[tuple[int, Any, Tensor]] = deque()
        self._posted: dict[Message, tuple[Any, Tensor]] = {}

    def send(self, message: Message, tensor: Tensor) -> None:
        source = tensor.detach()
        buffer = source.to("cpu") if self._through_host else source.contiguous()
        if buffer.data_ptr() == source.data_ptr():
            buffer = buffer.clone()  # the caller may go on to change it in place
        start_s = time.perf_counter()
        work = dist.isend(buffer, self._ranks[message.target], group=self._group(message), tag=_tag(message))
        if self.listen is not None:
            work = self.listen.sent(work, self._ranks[message.target], buffer.nbytes, start_s)
        self._sending.append((message.batch, work, buffer))
        while self._sending and self._sending[0][1].is_completed():
            self._sending.popleft()

    def expect(self, message: Message, spec: TensorSpec) -> None:
        self._posted[message] = self._post(message, spec)

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        if message not in self._posted:
            self.expect(message, spec)
        work, buffer = self._posted.pop(message)
        if (tuple(buffer.shape), buffer.dtype) != (spec.shape, spec.dtype):
            raise CommunicationError(
                f"{message} was announced as {TensorSpec.of(buffer)} and is received as {spec}: batches of one "
                f"signature took different ways; let the step do the same for all batches of one shape"
            )
        start_s = time.perf_counter()
        try:
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            late = "Timed out" in str(error)
            why = f"did not come within {self._timeout_s:g} s" if late else "cannot come: the connection is closed"
            raise CommunicationError(
                f"stage {message.target} waited for {message} ({spec}), which {why}; look at rank "
                f"{self._ranks[message.source]} ({str(error).splitlines()[0]})"
            ) from error
        if self.listen is not None:
            self.listen.received(self._ranks[message.source], buffer.nbytes, start_s)
        return buffer.to(self._device, non_blocking=True) if self._through_host else buffer

    def flush(self, *, before: int | None = None) -> None:
        while self._sending and (before is None or self._sending[0][0] < before):
            _, work, _ = self._sending.popleft()
            work.wait(timedelta(seconds=self._timeout_s))

    def close(self) -> None:
        """Gives the process groups back; messages under way are lost."""
        for group in self._groups.values():
            dist.destroy_process_group(group)

    def _post(self, message: Message, spec: TensorSpec) -> tuple[Any, Tensor]:
        device = torch.device("cpu") if self._through_host else self._device
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=device, pin_memory=self._through_host)
        work = dist.irecv(buffer, self._ranks[message.source], group=self._group(message), tag=_tag(message))
        return work, buffer

    def _group(self, message: Message) -> Any:
        return self._groups[message.direction]


def _tag(message: Message) -> int:
    if message.number >= _NUMBERS:
        raise CommunicationError(
            f"{message}: more than {_NUMBERS} transfers between two stages in one batch; cut the model elsewhere"
        )
    return message.batch % _BATCHES * _NUMBERS + message.number
