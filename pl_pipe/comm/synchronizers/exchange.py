"""Averages numbers among any workers by messages between pairs of them. synchronizer -> *Exchange* -> gloo.

Groups change from step to step. torch's `new_group` would need all ranks each time, or deadlock (its local form counts
a rank's own groups into the name); so there is one group of all workers, and members send each other slices:

    member      0        1        2          each owns a slice: it gets the others' parts of it, averages them in the
    first    ─ parts of the slice to its owner ─►                  order of the members, and sends the result to all.
    then     ◄─ the average of the slice to all ─   Each sends 2 (n-1)/n of the numbers, and all have the same bits.

A member that dies is left out: everyone sends all it owes in any case, so nobody waits for a consequence of it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pl_pipe.comm.interruption import ran_out_of_time
from pl_pipe.comm.peers import Peers, WorldPeers
from pl_pipe.comm.synchronizers.news import will_be_known
from pl_pipe.comm.transport import CommunicationError
from pl_pipe.comm.waiting import Wait, read_as, wait_for

_NUMBERS = 1 << 22  # before tags repeat


class Averaging(Protocol):
    """One worker's end. All members of a group must call it with the same arguments, but for their numbers."""

    def average(self, flat: Tensor, members: Sequence[int], shares: Sequence[float], number: int) -> list[int]:
        """`flat` becomes the sum of all members' times their shares; returns the members that were lost on the way."""


class Exchange:
    """Over a gloo group of its own; all peers must make theirs at the same point."""

    def __init__(
        self, peers: Peers | None = None, *, timeout_s: float = 300.0, is_gone: Callable[[int], bool] = lambda _: False
    ) -> None:
        """
        Args:
            peers: who may be members; by default all ranks of the default process group.
            is_gone: whether a rank has ended and may be left out; a connection that breaks otherwise is an error.
        """
        self._peers: Peers = WorldPeers(timeout_s=timeout_s) if peers is None else peers
        self.rank = self._peers.rank
        self._timeout_s = timeout_s
        self._is_gone = is_gone

    def average(self, flat: Tensor, members: Sequence[int], shares: Sequence[float], number: int) -> list[int]:
        if len(members) == 1:
            return []
        lost: set[int] = set()
        place = list(members).index(self.rank)
        slices = _slices(flat, len(members))
        others = [(other, member) for other, member in enumerate(members) if member != self.rank]
        sends = [(member, self._send(slices[other], member, number, 0)) for other, member in others]
        parts = {place: slices[place]}
        for other, member, buffer, work in [
            (other, member, *self._receive(slices[place], member, number, 0)) for other, member in others
        ]:
            if self._came(work, member, lost):
                parts[other] = buffer
        result = torch.zeros_like(slices[place])
        for other in sorted(parts):
            result.add_(parts[other], alpha=shares[other])
        present = sum(shares[other] for other in parts)
        if len(parts) < len(members) and present > 0:
            result.div_(present)
        sends += [(member, self._send(result, member, number, 1)) for _, member in others]
        averages = [(other, member, *self._receive(slices[other], member, number, 1)) for other, member in others]
        came = [(other, buffer) for other, member, buffer, work in averages if self._came(work, member, lost)]
        for member, work in sends:  # they read the numbers that change now
            self._came(work, member, lost)
        slices[place].copy_(result)
        for other, buffer in came:
            slices[other].copy_(buffer)
        return sorted(lost)

    def interrupt(self) -> None:
        """Every wait here raises, and those of the others for this rank."""
        self._peers.interrupt()

    def close(self) -> None:
        self._peers.close()

    def _send(self, part: Tensor, member: int, number: int, phase: int) -> Any:
        if not part.numel():
            return None
        return self._begun(partial(self._peers.isend, part, member, _tag(number, phase)), member)

    def _receive(self, like: Tensor, member: int, number: int, phase: int) -> tuple[Tensor, Any]:
        buffer = torch.empty_like(like)
        if not like.numel():
            return buffer, None
        return buffer, self._begun(partial(self._peers.irecv, buffer, member, _tag(number, phase)), member)

    def _begun(self, start: Callable[[], Any], member: int) -> Any:
        """The work, or the error with which it could not even begin."""
        try:
            with read_as(partial(self._wait, member), timeout_s=self._timeout_s):
                return start()
        except CommunicationError as error:
            return error

    def _came(self, work: Any, member: int, lost: set[int]) -> bool:
        if work is None:
            return member not in lost
        try:
            if isinstance(work, CommunicationError):
                raise work
            wait_for(work, partial(self._wait, member), timeout_s=self._timeout_s)
        except CommunicationError as error:
            if member not in lost and (_is_late(error) or not will_be_known(self._is_gone, member)):
                raise
            lost.add(member)
            return False
        return True

    def _wait(self, member: int) -> Wait:
        return Wait(f"rank {self.rank}", f"the parameters of rank {member}, to average with", [member])


def _is_late(error: CommunicationError) -> bool:
    return ran_out_of_time(error) and "did not come within" in str(error)


def _tag(number: int, phase: int) -> int:
    return number % _NUMBERS * 2 + phase


def _slices(flat: Tensor, count: int) -> list[Tensor]:
    return list(torch.tensor_split(flat, count))
