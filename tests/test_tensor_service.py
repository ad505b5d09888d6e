"""Calls between workers, and what a caller learns of a worker that cannot answer. In one process, over queues."""

import queue
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from pl_pipe.comm.synchronizers.service import TensorService
from pl_pipe.errors import StageError

Wires = dict[tuple[int, int, int], "queue.Queue[Tensor]"]


class _Work:
    def __init__(self, end: Callable[[float], None]) -> None:
        self._end = end

    def wait(self, timeout: timedelta) -> None:
        self._end(timeout.total_seconds())


class QueuePeers:
    """Ends of the same wires: (source, target, tag)."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self.rank, self.ranks, self._wires = rank, (0, 1), wires

    def isend(self, tensor: Tensor, target: int, tag: int) -> Any:
        self._wires[self.rank, target, tag].put(tensor.clone())
        return _Work(lambda _: None)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Any:
        wire = self._wires[source, self.rank, tag]

        def take(timeout_s: float) -> None:
            tensor.copy_(wire.get(timeout=min(timeout_s, 30.0)))

        return _Work(take)

    def sum(self, tensor: Tensor) -> Any:
        raise NotImplementedError

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Doubles:
    """Refuses what is negative, as a handler with a defect would."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def handle(self, source: int, operation: int, numbers: Tensor) -> Tensor:
        assert numbers.min() >= 0
        return 2 * numbers

    def gone(self, source: int) -> None:
        self.left.append(source)


def test_a_caller_is_told_of_a_handler_that_fails() -> None:
    wires: Wires = defaultdict(queue.Queue)
    handlers = [Doubles(), Doubles()]
    services = [
        TensorService(handler, QueuePeers(rank, wires), dtype=torch.float64, timeout_s=20.0)
        for rank, handler in enumerate(handlers)
    ]
    numbers = torch.arange(3, dtype=torch.float64)
    assert torch.equal(services[0].call(1, 7, numbers), 2 * numbers)
    with pytest.raises(StageError, match="rank 1 could not do what rank 0 asked it for; its log says why"):
        services[0].call(1, 7, numbers - 1)
    assert torch.equal(services[0].call(1, 7, numbers), 2 * numbers)  # it answers what it can
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(TensorService.close, services))
    assert [handler.left for handler in handlers] == [[1], [0]]
