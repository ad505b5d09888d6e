"""One clock for all ranks: rank 0's `time.perf_counter`. process group -> *common clock* -> recorder.

rank 0    ask ─────────────► answer          a rank's clock is ahead by what it answered, less the middle of the
rank r          └► its time ─┘               round trip; the quickest of several trips has the least error
"""

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 12


@dataclass(frozen=True)
class Reading:
    """How far this rank's clock was ahead of rank 0's, at a time of its own."""

    own_s: float
    ahead_s: float
    round_trip_s: float
    """Twice the most by which `ahead_s` can be wrong."""


def read_clocks(*, group: Any = None, rounds: int = ROUNDS) -> Reading:
    """This rank's; all ranks of the group must call it at the same point.

    Args:
        group: one that carries tensors on CPUs, whose first rank has the clock; None is the default process group.
    """
    mine = Reading(time.perf_counter(), 0.0, 0.0)
    if not dist.is_initialized():
        return mine
    rank, others = dist.get_rank(group), range(1, dist.get_world_size(group))
    for other in others:
        if rank == 0:
            _ask(other, group, rounds)
        elif rank == other:
            mine = _answered(group, rounds)
    return mine


@dataclass(frozen=True)
class CommonClock:
    """Translates a rank's times: clocks of several machines part by some microseconds a second, so two readings."""

    before: Reading
    after: Reading

    def common_s(self, own_s: float) -> float:
        length_s = self.after.own_s - self.before.own_s
        share = (own_s - self.before.own_s) / length_s if length_s > 0 else 0.0
        return own_s - self.before.ahead_s - share * (self.after.ahead_s - self.before.ahead_s)

    @property
    def error_s(self) -> float:
        return max(self.before.round_trip_s, self.after.round_trip_s) / 2


def _ask(other: int, group: Any, rounds: int) -> None:
    times_s = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        times_s[0] = time.perf_counter()
        dist.send(times_s, group=group, group_dst=other)
        dist.recv(times_s, group=group, group_src=other)
        times_s[0] = time.perf_counter()
        dist.send(times_s, group=group, group_dst=other)


def _answered(group: Any, rounds: int) -> Reading:
    """Rank 0 says when it asked, and then when it had the answer."""
    best: Reading | None = None
    times_s = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):
        dist.recv(times_s, group=group, group_src=0)
        own_s, asked_s = time.perf_counter(), float(times_s[0])
        times_s[1] = own_s
        dist.send(times_s, group=group, group_dst=0)
        dist.recv(times_s, group=group, group_src=0)
        trip_s = float(times_s[0]) - asked_s
        if best is None or trip_s < best.round_trip_s:
            best = Reading(own_s, own_s - (asked_s + float(times_s[0])) / 2, trip_s)
    assert best is not None
    return best
