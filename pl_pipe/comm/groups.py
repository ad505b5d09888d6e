"""The process groups that messages go through, by backend. *groups* -> DistributedTransport.

gloo   one group a direction: gradients must not wait behind activations; tags tell messages apart
nccl   one group a direction and pair of ranks. NCCL has no tags: a communicator's n-th send meets its n-th receive, and
       they follow each other on one stream. So no two kinds of messages may share one:

           rank 1 ── forward ──► rank 2      activations of every batch in the order of their numbers, on both sides
           rank 1 ◄─ backward ── rank 2      gradients in the same order

       A communicator is made at its first message, which waits for the other side; in the middle of a step three ranks
       could wait for each other. So each pair meets once at the beginning, in an order that is the same everywhere.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import combinations
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pl_pipe.comm.interruption import interrupt_group
from pl_pipe.comm.transport import Direction
from pl_pipe.comm.waiting import Wait, read_as, wait_for


class Groups(Protocol):
    """All ranks of the default process group must make theirs at the same point."""

    def between(self, direction: Direction, one: int, other: int) -> Any:
        """The group for messages between two ranks."""

    def interrupt(self) -> None:
        """Ends waits that nothing else would end."""

    def close(self) -> None: ...


class DirectionGroups:
    """Two groups of all ranks."""

    def __init__(self, *, backend: str, timeout: timedelta) -> None:
        self._groups = {direction: dist.new_group(backend=backend, timeout=timeout) for direction in Direction}

    def between(self, direction: Direction, one: int, other: int) -> Any:  # noqa: ARG002
        return self._groups[direction]

    def interrupt(self) -> None:
        for group in self._groups.values():
            interrupt_group(group)

    def close(self) -> None:
        give_back(self._groups)


class PairGroups:
    """Two groups for each pair of ranks that may have something to send each other: those of different stages."""

    def __init__(
        self, ranks: Sequence[Sequence[int]], *, backend: str, timeout: timedelta, device: torch.device
    ) -> None:
        self._groups: dict[tuple[Direction, int, int], Any] = {}
        mine = dist.get_rank()
        stage_of = {rank: stage for stage, replicas in enumerate(ranks) for rank in replicas}
        for pair in combinations(sorted(stage_of), 2):
            if stage_of[pair[0]] == stage_of[pair[1]]:
                continue
            for direction in Direction:
                group = dist.new_group(list(pair), backend=backend, timeout=timeout)  # a rank outside has to ask too
                if mine in pair:
                    self._groups[(direction, *pair)] = group
        for (_, first, second), group in self._groups.items():
            _meet(group, mine, first, second, device, timeout)

    def between(self, direction: Direction, one: int, other: int) -> Any:
        return self._groups[direction, min(one, other), max(one, other)]

    def interrupt(self) -> None:
        """NCCL's waits end by themselves."""

    def close(self) -> None:
        give_back(self._groups)


def give_back(groups: dict[Any, Any]) -> None:
    """Destroys process groups and forgets them: their threads and sockets go with the last reference."""
    while groups:
        _, group = groups.popitem()
        dist.destroy_process_group(group)


def _meet(group: Any, mine: int, first: int, second: int, device: torch.device, timeout: timedelta) -> None:
    """A first message of one number, so that both sides have the communicator. With NCCL, too, the process waits."""
    number, other = torch.zeros(1, device=device), second if mine == first else first
    timeout_s = timeout.total_seconds()

    def meeting() -> Wait:
        return Wait(f"rank {mine}", f"rank {other} to meet it before the first batch", [other], ", or set backend=gloo")

    with read_as(meeting, timeout_s=timeout_s):
        work = dist.isend(number, other, group=group) if mine == first else dist.irecv(number, other, group=group)
    wait_for(work, meeting, timeout_s=timeout_s)
