"""Who averages with whom: groups of workers that are ready at about the same time. arrivals -> *GroupFormer* -> groups.

SD-Pipe's partial reduce (VLDB'23) as a state machine without clocks and threads: it is told what happens and when, and
answers with the groups that this closes. A worker that has arrived stands still until its group is named.

    now     arrives   ready        why it closes
    0.000   2         2            opens: the deadline is worker 2's waiting time
    0.001   0         2 0
    0.002             -> {0, 2}    the deadline, or all that could come are here, or the group is full

Groups by chance may leave worker 3 among strangers for ever. So after every P rounds (P times as many arrivals as there
are workers) a group has no deadline and waits until the groups since the last such one connect all workers. Nobody
waits for ever: at the latest it closes when all workers stand here.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pl_pipe.errors import ConfigError
from pl_pipe.grouping.connectivity import Connectivity

_EASED, _GROWN = 0.9, 2.0


@dataclass(frozen=True)
class GroupRules:
    """How groups are formed. Times are those of the original."""

    first_wait_s: float = 0.001
    """How long a worker that opens a group waits for others, at first."""
    shortest_wait_s: float = 0.00001
    longest_wait_s: float = 0.01
    least: int = 2
    """A group with fewer members makes its first member wait twice as long the next time, another a tenth less."""
    group_size: int | None = None
    """Members of a group, but for those that connect all workers."""
    connect_every: int = 10
    """Rounds after which a group waits until all workers are connected; 1 lets every second round do so."""
    pairs_above: int = 8
    """With more workers than this, what is ready is divided into pairs."""

    def __post_init__(self) -> None:
        for name in ("shortest_wait_s", "first_wait_s", "longest_wait_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(
                    f"{name}={value!r}: with no time to wait every group has one worker, and nothing is ever averaged; "
                    f"give seconds, such as {GroupRules.__dataclass_fields__[name].default}"
                )
        if not self.shortest_wait_s <= self.first_wait_s <= self.longest_wait_s:
            raise ConfigError(
                f"first_wait_s={self.first_wait_s:g} is not between shortest_wait_s={self.shortest_wait_s:g} and "
                f"longest_wait_s={self.longest_wait_s:g}"
            )
        for name, least in (("least", 1), ("group_size", 2), ("connect_every", 1), ("pairs_above", 2)):
            value = getattr(self, name)
            if (value is None and name != "group_size") or (
                value is not None and (not isinstance(value, int) or value < least)
            ):
                raise ConfigError(f"{name}={value!r}; give a number of {least} or more")
        if self.group_size is not None and self.group_size < self.least:
            raise ConfigError(
                f"group_size={self.group_size} is less than least={self.least}; groups could never be large enough"
            )


@dataclass(frozen=True)
class Group:
    """Workers that are to average now."""

    number: int
    """Of this group among all of a run."""
    members: tuple[int, ...]
    """In order of their numbers."""
    iterations: tuple[int, ...]
    """Steps that each member's parameters have behind them: its own, or those it took over from a group."""
    waited_s: tuple[float, ...]
    connects: bool = False
    """It waited until all workers were connected."""


class GroupFormer:
    """One set of workers, such as the replicas of a stage."""

    def __init__(
        self,
        workers: Iterable[int],
        rules: GroupRules | None = None,
        *,
        may_connect: Callable[[], bool] = lambda: True,
    ) -> None:
        """
        Args:
            may_connect: whether a group may wait without a deadline now. Of several formers whose workers wait for each
                other, as those of the stages of pipelines do, only one at a time may.
        """
        self.rules = rules or GroupRules()
        self._may_connect = may_connect
        self.present: set[int] = set(workers)
        """Workers that may still arrive."""
        self._ready: dict[int, float] = {}
        """Who stands here since when; in the order of arrival."""
        self._waits_s: dict[int, float] = {}
        self._iterations: dict[int, int] = {}
        self._connectivity = Connectivity()
        self._deadline_s: float | None = None
        self._connecting = False
        self._arrivals = 0
        """Of workers in groups since all were connected."""
        self._formed = 0

    @property
    def deadline_s(self) -> float | None:
        """When `elapse` should be called at the latest; None while nobody waits, or nothing but an arrival helps."""
        return None if self._connecting or not self._ready else self._deadline_s

    @property
    def is_connecting(self) -> bool:
        """Whether workers wait here without a deadline."""
        return self._connecting and bool(self._ready)

    @property
    def ready(self) -> tuple[int, ...]:
        return tuple(self._ready)

    def iteration(self, worker: int) -> int:
        return self._iterations.get(worker, 0)

    def arrive(self, worker: int, now_s: float, *, steps: int = 1) -> list[Group]:
        """The worker has taken so many steps since its last group, and stands still until it is in one."""
        assert worker in self.present, f"worker {worker} has left"
        assert worker not in self._ready, f"worker {worker} is here already"
        if not self._ready:
            self._deadline_s = now_s + self._waits_s.get(worker, self.rules.first_wait_s)
            due = self._arrivals >= self.rules.connect_every * len(self.present)
            self._connecting = due and self._may_connect()
        self._ready[worker] = now_s
        self._iterations[worker] = self._iterations.get(worker, 0) + steps
        return self._closed(now_s)

    def elapse(self, now_s: float) -> list[Group]:
        """Time has passed."""
        return self._closed(now_s)

    def leave(self, worker: int, now_s: float) -> list[Group]:
        """The worker has ended, or has no more steps to take for now; groups no longer wait for it."""
        self.present.discard(worker)
        self._ready.pop(worker, None)
        return self._closed(now_s)

    def join(self, worker: int) -> None:
        """The worker takes steps (again)."""
        self.present.add(worker)

    def reunited(self, workers: Iterable[int]) -> None:
        """All parameters have been averaged by other means: everyone is connected, and equally far. All of these may
        arrive now; who is first is not alone."""
        self.present = set(workers)
        self._connectivity.forget()
        self._arrivals = 0
        furthest = max(self._iterations.values(), default=0)
        self._iterations = dict.fromkeys(self._iterations, furthest)

    def _closed(self, now_s: float) -> list[Group]:
        if not self._ready:
            return []
        everyone = len(self._ready) == len(self.present)
        if self._connecting:
            if not everyone and not self._connectivity.connects_with(self._ready, self.present):
                return []
        elif not everyone and len(self._ready) != self.rules.group_size and now_s < (self._deadline_s or 0.0):
            return []
        connects, first = self._connecting, next(iter(self._ready))
        members = [sorted(self._ready)] if connects else self._divided(sorted(self._ready))
        groups = [self._group(part, now_s, connects) for part in members]
        self._adapt(first, next(len(part) for part in members if first in part))
        self._ready.clear()
        self._deadline_s = None
        if connects:
            self._connectivity.forget()
            self._arrivals, self._connecting = 0, False
        else:
            self._arrivals += sum(map(len, members))
        return groups

    def _divided(self, ready: list[int]) -> list[list[int]]:
        if len(self.present) <= self.rules.pairs_above:
            return [ready]
        return [ready[place : place + 2] for place in range(0, len(ready), 2)]

    def _group(self, members: Sequence[int], now_s: float, connects: bool) -> Group:
        self._connectivity.merge(members)
        iterations = tuple(self._iterations[member] for member in members)
        for member in members:
            self._iterations[member] = max(iterations)
        waited_s = tuple(now_s - self._ready[member] for member in members)
        self._formed += 1
        return Group(self._formed - 1, tuple(members), iterations, waited_s, connects)

    def _adapt(self, worker: int, size: int) -> None:
        rules = self.rules
        wait_s = self._waits_s.get(worker, rules.first_wait_s) * (_GROWN if size < rules.least else _EASED)
        self._waits_s[worker] = min(max(wait_s, rules.shortest_wait_s), rules.longest_wait_s)


class RecentGroups:
    """The last groups of a run, for those who want to see them; what is older is only counted."""

    def __init__(self, most: int = 10_000) -> None:
        self.kept: deque[Group] = deque(maxlen=most)
        self.count = 0

    def add(self, groups: Iterable[Group]) -> None:
        for group in groups:
            self.kept.append(group)
            self.count += 1
