"""Ping-pong and all-reduce against the clock: the two things a link probe does. *link timing* -> link probe.

How many repeats a size gets, and which sizes a slow link is spared, must be the same on all ranks that take part: a
ping tells its pong, and all-reducing ranks compute it from the slowest one's times, which all of them see.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from pl_pipe.errors import ConfigError

ALL_REDUCE_BUDGETS = 2
"""All sizes of an all-reduce may take as long as this many pairs."""

_WARM_UP = 2
_LEAST_REPEATS = 3
_LEAST_SIZES = 2  # a line needs two points, however slow the link

Row = tuple[float, float, float, int]
"""Median, first and third quartile in seconds, and how many were timed."""


@dataclass(frozen=True)
class Effort:
    """How much to measure: repeats shrink as messages grow, and sizes that exceed the budget are left out."""

    sizes_bytes: tuple[int, ...]
    repeats: int
    budget_s: float

    def __post_init__(self) -> None:
        sizes = self.sizes_bytes
        rising = all(a < b for a, b in pairwise(sizes))
        if len(sizes) < _LEAST_SIZES or not rising or any(size < 4 or size % 4 for size in sizes):
            raise ConfigError(
                f"message sizes {list(sizes)} are not two or more rising multiples of 4 bytes; "
                f"give for example 4096, 1048576"
            )
        if self.repeats < 1 or not self.budget_s > 0:
            raise ConfigError(
                f"repeats={self.repeats} and a budget of {self.budget_s} s leave nothing to measure; "
                f"give at least 1 repeat and more than 0 s"
            )

    def affords(self, index: int, pace_s: float, left_s: float) -> bool:
        """Whether size `index` fits into the time left, where the size before it took `pace_s`."""
        if index < _LEAST_SIZES:
            return True
        expected_s = pace_s * self.sizes_bytes[index] / self.sizes_bytes[index - 1]
        return expected_s * (_WARM_UP + _LEAST_REPEATS) <= left_s

    def rounds(self, index: int, pace_s: float, left_s: float) -> int:
        """Repeats of size `index`: for a tenth of the time left, since larger sizes follow and tell the bandwidth."""
        share_s = left_s if index == len(self.sizes_bytes) - 1 else left_s / 10
        return min(self.repeats, max(_LEAST_REPEATS, int(share_s / max(pace_s, 1e-9))))


@dataclass(frozen=True)
class Group:
    """Ranks that act together; None is the default group."""

    data: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    """For orders, results and barriers: host tensors, which NCCL cannot carry."""


class Wire:
    """This rank's messages, and the clock they are timed by."""

    def __init__(self, device: str, most_bytes: int) -> None:
        # filled, because untouched memory is one page of zeros over and over, which is sent faster than data
        self._buffer = torch.empty(most_bytes // 4, device=device).fill_(0.0)
        self.cuda = self._buffer.is_cuda

    def message(self, size_bytes: int) -> torch.Tensor:
        return self._buffer[: size_bytes // 4]

    def timed_s(self, act: Callable[[], object]) -> float:
        start = time.perf_counter()
        act()
        self.settle()
        return time.perf_counter() - start

    def settle(self) -> None:
        """Waits for what was started: NCCL's calls return before they are done."""
        if self.cuda:
            torch.cuda.synchronize(self._buffer.device)


def ping(wire: Wire, group: Group, peer: int, effort: Effort) -> list[Row]:
    """One-way times to `peer`, by size: half the round trip. The peer runs `pong` meanwhile."""

    def round_trips_s(size_bytes: int, rounds: int) -> list[float]:
        message = wire.message(size_bytes)

        def there_and_back() -> None:
            dist.send(message, peer)
            dist.recv(message, peer)

        dist.send(torch.tensor([size_bytes, rounds]), peer, group=group.control)
        return [wire.timed_s(there_and_back) for _ in range(rounds)]

    rows = _by_size(round_trips_s, effort, effort.budget_s)
    dist.send(torch.tensor([0, 0]), peer, group=group.control)
    return [(middle / 2, low / 2, high / 2, repeats) for middle, low, high, repeats in rows]


def pong(wire: Wire, group: Group, peer: int) -> None:
    """Answers `ping`, which tells each size and number of rounds, and at last none."""
    order = torch.zeros(2, dtype=torch.int64)
    while True:
        dist.recv(order, peer, group=group.control)
        size_bytes, rounds = order.tolist()
        if not rounds:
            return
        message = wire.message(size_bytes)
        for _ in range(rounds):
            dist.recv(message, peer)
            dist.send(message, peer)
        wire.settle()


def all_reduces(wire: Wire, group: Group, effort: Effort) -> list[Row]:
    """Times of all-reduces over `group`, by size, until its last rank was done; the same on all its ranks."""

    def slowest_s(size_bytes: int, rounds: int) -> list[float]:
        message = wire.message(size_bytes)
        times = torch.zeros(rounds, dtype=torch.float64)
        for number in range(rounds):
            dist.barrier(group=group.control)
            times[number] = wire.timed_s(lambda: dist.all_reduce(message, group=group.data))
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group.control)
        return [float(seconds) for seconds in times]

    return _by_size(slowest_s, effort, ALL_REDUCE_BUDGETS * effort.budget_s)


def _by_size(run: Callable[[int, int], list[float]], effort: Effort, budget_s: float) -> list[Row]:
    """Warms up and times each size that the budget affords, smallest first."""
    run(effort.sizes_bytes[0], _WARM_UP)  # not counted: NCCL makes its connections now
    rows: list[Row] = []
    left_s, pace_s = budget_s, 0.0
    for index, size_bytes in enumerate(effort.sizes_bytes):
        if not effort.affords(index, pace_s, left_s):
            break
        warm_s = run(size_bytes, _WARM_UP)
        pace_s, left_s = warm_s[-1], left_s - sum(warm_s)
        times_s = run(size_bytes, effort.rounds(index, pace_s, left_s))
        left_s -= sum(times_s)
        low, middle, high = (float(end) for end in np.quantile(times_s, (0.25, 0.5, 0.75)))
        rows.append((middle, low, high, len(times_s)))
    return rows
