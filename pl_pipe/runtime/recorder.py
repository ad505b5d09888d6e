"""What one rank really did, as events on the clock of all ranks. Executor, transport -> *Recorder* -> report."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pl_pipe.comm.common_clock import CommonClock, Reading
from pl_pipe.comm.listening import SendWatch
from pl_pipe.events import Event
from pl_pipe.schedule import Kind

_PENDING = 1 << 13  # messages outside forwards and backwards (a validation's) that are kept until the next of these
_KINDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", None: "all_reduce"}


@dataclass
class _Passed:
    """A message that was sent or waited for."""

    kind: str
    peer: int
    size_bytes: int
    start_s: float
    end_s: float | None = None

    def left(self, end_s: float) -> None:
        self.end_s = end_s


@dataclass(frozen=True)
class RankRecord:
    """One rank's part of a recorded run."""

    events: tuple[Event, ...]
    segments: tuple[int, ...]
    """Mini-batches that entered an empty pipeline."""
    clock_error_s: float


class Recorder:
    """Listens to a rank's executor and transport, for the mini-batches from `first` until `end`."""

    def __init__(
        self, *, rank: int, stage: int, first: int, clock: Reading, synchronize: Callable[[], None] | None = None
    ) -> None:
        """`synchronize` waits for a device that computes on its own, so that what it does counts where it was asked."""
        self.first = first
        self.end: int | None = None
        """The first mini-batch that is not recorded any more; None while that is not known."""
        self.complete = False
        """Backwards have passed the end."""
        self._rank, self._stage, self._clock = rank, stage, clock
        self._synchronize = synchronize
        self._events: list[Event] = []
        self._segments: set[int] = set()
        self._pending: deque[_Passed] = deque(maxlen=_PENDING)
        self._messages: list[tuple[int, _Passed]] = []
        self._watch = SendWatch()

    def acted(self, kind: Kind | None, batch: int, segment: int, start_s: float) -> None:
        """To be the executor's `listen`."""
        if self._synchronize is not None:
            self._synchronize()
        end_s = time.perf_counter()
        if self.first <= batch and (self.end is None or batch < self.end):
            self._events.append(Event(self._rank, _KINDS[kind], start_s, end_s, batch, self._stage))
            self._segments.add(segment)
            self._messages += [(batch, message) for message in self._pending if message.start_s >= start_s]
        elif self.end is not None and batch >= self.end and kind is Kind.BACKWARD:
            self.complete = True
        self._pending.clear()

    def sent(self, work: Any, peer: int, size_bytes: int, start_s: float) -> Any:
        message = _Passed("send", peer, size_bytes, start_s)
        self._pending.append(message)
        return self._watch.watch(work, message.left)

    def received(self, peer: int, size_bytes: int, start_s: float) -> None:
        self._pending.append(_Passed("receive", peer, size_bytes, start_s, time.perf_counter()))

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Waits so long for what is being sent; nobody must listen through it any more."""
        self._watch.close(timeout_s=timeout_s)

    def record(self, clock: Reading) -> RankRecord:
        """All of it, in the order of time; `clock` is a second reading, from after the run."""
        common = CommonClock(self._clock, clock)
        messages = [
            Event(self._rank, message.kind, message.start_s, message.end_s, batch, self._stage, message.peer,
                  message.size_bytes)
            for batch, message in self._messages
            if message.end_s is not None
        ]  # fmt: skip
        events = (
            replace(event, start_s=common.common_s(event.start_s), end_s=common.common_s(event.end_s))
            for event in (*self._events, *messages)
        )
        return RankRecord(
            events=tuple(sorted(events, key=lambda event: (event.start_s, -event.end_s))),
            segments=tuple(sorted(self._segments)),
            clock_error_s=common.error_s,
        )
