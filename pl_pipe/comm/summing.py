"""The port through which the replicas of a stage add up tensors. gradient averaging -> *Summing* -> other replicas."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.peers import Peers
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.comm.waiting import Wait, read_as, wait_for


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Returns when the tensor holds the sum; raises CommunicationError when a replica does not come."""


class Summing(Protocol):
    """One replica's end. All replicas must start the same sums in the same order."""

    def start(self, tensor: Tensor) -> Pending:
        """The tensor will hold the sum over the replicas, and must be left alone until then."""


class DistributedSumming:
    """Over a process group of the stage's ranks."""

    def __init__(self, group: Any, ranks: Sequence[int], *, timeout_s: float = 300.0) -> None:
        self._group = group
        self._ranks = list(ranks)
        self._timeout_s = timeout_s

    def start(self, tensor: Tensor) -> Pending:
        with read_as(self._wait, timeout_s=self._timeout_s):
            work = self._begun(tensor)
        return _DistributedPending(self, work)

    def _begun(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def wait(self, work: Any) -> None:
        wait_for(work, self._wait, timeout_s=self._timeout_s)

    def _mine(self) -> int:
        return dist.get_rank()

    def _wait(self) -> Wait:
        mine = self._mine()
        others = [rank for rank in self._ranks if rank != mine]
        return Wait(f"rank {mine}", "the other ranks' gradients", others)


class PeerSumming(DistributedSumming):
    """Over peers that are no process group of torch.distributed's."""

    def __init__(self, peers: Peers, *, timeout_s: float = 300.0) -> None:
        super().__init__(None, peers.ranks, timeout_s=timeout_s)
        self._peers = peers

    def _begun(self, tensor: Tensor) -> Any:
        return self._peers.sum(tensor)

    def _mine(self) -> int:
        return self._peers.rank


class _DistributedPending:
    def __init__(self, summing: DistributedSumming, work: Any) -> None:
        self._summing, self._work = summing, work

    def wait(self) -> None:
        self._summing.wait(self._work)


class LocalSums:
    """Replicas as threads of one process: the double, for tests and trials."""

    def __init__(self, replicas: int, *, timeout_s: float = 20.0) -> None:
        self.replicas = replicas
        self.timeout_s = timeout_s
        self._given: dict[int, dict[int, Tensor]] = {}
        self._sums: dict[int, tuple[Tensor, int]] = {}
        """With how many replicas have yet to take it; the last one takes it away."""
        self._changed = threading.Condition()

    def replica(self, place: int) -> "LocalSumming":
        return LocalSumming(self, place)

    def give(self, ordinal: int, place: int, tensor: Tensor) -> None:
        with self._changed:
            given = self._given.setdefault(ordinal, {})
            given[place] = tensor.clone()
            if len(given) == self.replicas:
                total: Any = sum(given[place] for place in sorted(given))
                self._sums[ordinal] = total, self.replicas
                del self._given[ordinal]
                self._changed.notify_all()

    def take(self, ordinal: int) -> Tensor:
        with self._changed:
            if not self._changed.wait_for(lambda: ordinal in self._sums, self.timeout_s):
                came = sorted(self._given.get(ordinal, ()))
                raise CommunicationError(f"sum {ordinal}: only replicas {came} of {self.replicas} came")
            total, left = self._sums.pop(ordinal)
            if left > 1:
                self._sums[ordinal] = total, left - 1
            return total

    def __len__(self) -> int:
        """Sums that someone has yet to give to or to take."""
        return len(self._given) + len(self._sums)


class LocalSumming:
    """One replica's end of LocalSums."""

    def __init__(self, sums: LocalSums, place: int) -> None:
        self._sums, self._place = sums, place
        self._started = 0

    def start(self, tensor: Tensor) -> Pending:
        ordinal = self._started
        self._started += 1
        self._sums.give(ordinal, self._place, tensor)
        return _LocalPending(self._sums, ordinal, tensor)


class _LocalPending:
    def __init__(self, sums: LocalSums, ordinal: int, tensor: Tensor) -> None:
        self._sums, self._ordinal, self._tensor = sums, ordinal, tensor
        self._is_here = False

    def wait(self) -> None:
        if not self._is_here:
            self._tensor.copy_(self._sums.take(self._ordinal))
            self._is_here = True
