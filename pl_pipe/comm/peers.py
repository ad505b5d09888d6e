"""The port through which a fixed set of ranks send each other numbers. exchange, service, sums -> *Peers* -> gloo.

Two adapters. `WorldPeers` are all ranks of the default process group. `StorePeers` are any ranks that share a store:
the replicas of a stage in several pipelines, each of which is the default process group of its own ranks.
"""

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.interruption import AT_ONCE, UNUSED_TAG, interrupt_group, interrupted_with_the_others

FIRST_TIMEOUT_S = 300.0


class Peers(Protocol):
    """One rank's end. Works are torch.distributed's."""

    rank: int
    ranks: tuple[int, ...]
    """All of them, this one too."""

    def isend(self, tensor: Tensor, target: int, tag: int) -> Any: ...

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Any: ...

    def sum(self, tensor: Tensor) -> Any:
        """The tensor will hold the sum over all; all must ask for the same sums in the same order."""

    def interrupt(self) -> None:
        """Every wait here raises, and those of the others for this rank."""

    def close(self) -> None: ...


class WorldPeers:
    """All ranks of the default process group must make theirs at the same point."""

    def __init__(self, *, timeout_s: float = FIRST_TIMEOUT_S) -> None:
        self.rank, self.ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def isend(self, tensor: Tensor, target: int, tag: int) -> Any:
        return dist.isend(tensor, target, group=self._group, tag=tag)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Any:
        return dist.irecv(tensor, source, group=self._group, tag=tag)

    def sum(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def interrupt(self) -> None:
        interrupt_group(self._group)

    def close(self) -> None:
        dist.destroy_process_group(self._group)
        self._group = None


class StorePeers:
    """The given ranks alone make theirs at the same point; torch.distributed's own groups would need all."""

    def __init__(
        self, store: Any, name: str, rank: int, ranks: Sequence[int], *, timeout_s: float = FIRST_TIMEOUT_S
    ) -> None:
        """
        Args:
            store: that all of them share.
            name: the same on all, and used once.
        """
        self.rank, self.ranks = rank, tuple(ranks)
        self._places = {member: place for place, member in enumerate(self.ranks)}
        prefix = dist.distributed_c10d.PrefixStore(name, store)
        timeout = timedelta(seconds=timeout_s)
        self._group: Any = dist.ProcessGroupGloo(prefix, self._places[rank], len(self.ranks), timeout)
        interrupted_with_the_others.add(self)

    def isend(self, tensor: Tensor, target: int, tag: int) -> Any:
        return self._group.send([tensor], self._places[target], tag)

    def irecv(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._group.recv([tensor], self._places[source], tag)

    def sum(self, tensor: Tensor) -> Any:
        return self._group.allreduce([tensor])

    def interrupt(self) -> None:
        group = self._group
        for member, place in self._places.items():
            if member == self.rank or group is None:
                continue
            try:
                group.recv([torch.empty(1)], place, UNUSED_TAG).wait(AT_ONCE)
            except (RuntimeError, ValueError) as error:
                if "closed by peer" not in str(error):  # by this peer alone: what waits for others still waits
                    return

    def close(self) -> None:
        interrupted_with_the_others.discard(self)
        group, self._group = self._group, None
        with suppress(AttributeError, RuntimeError):
            group.shutdown()
