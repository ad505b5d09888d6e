"""How long messages were in flight. WatchedMailbox -> *TrafficWatch* -> monitors.

A rank that waits for a message does not know whether the link is slow or the sender late. So senders tell when they
began; on one clock, a message was in flight from then, or from when its receiver was ready, to when it was here.

    sender     computes ────────┤ began
    receiver   ready ├─ waits ──┼══ in flight ══┤ here
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import Tensor

from pl_pipe.comm.followed import EVER, FollowedWork
from pl_pipe.comm.listening import SendWatch
from pl_pipe.comm.summing import Pending
from pl_pipe.comm.topology.mailbox import Mailbox

Clock = Callable[[float], float]
"""From this rank's `time.perf_counter` to one that all ranks share."""


class LinkUse(NamedTuple):
    """What came over a link, and for how long something was in flight there."""

    size_bytes: int
    in_flight_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.size_bytes / self.in_flight_s if self.in_flight_s > 0 else 0.0


class _Flight(NamedTuple):
    began_s: float
    ended_s: float
    size_bytes: int


class TrafficWatch:
    """One rank's: what came to it, by sender. Threads wait for messages, so that each has the time at which it came."""

    def __init__(self, clock: Clock = lambda own_s: own_s) -> None:
        self.clock = clock
        self._flights: dict[int, list[_Flight]] = defaultdict(list)
        self._threads: dict[int, SendWatch] = {}
        self._teller: SendWatch | None = None
        self._told_last: FollowedWork | None = None
        self._lock = threading.Lock()

    def follow(self, message: Pending, peer: int, on_end: Callable[[float], None]) -> Pending:
        if peer not in self._threads:
            self._threads[peer] = SendWatch()
        return _Followed(self._threads[peer].watch(_All([message]), on_end))

    def note(self, peer: int, began_s: float, ended_s: float, size_bytes: int) -> None:
        with self._lock:
            self._flights[peer].append(_Flight(began_s, max(began_s, ended_s), size_bytes))

    def await_telling(self, messages: Sequence[Pending], note: Callable[[], None]) -> None:
        """A thread waits for what notes more flights: no sum need wait for it. Were it to fail, `take` would say so."""
        if self._teller is None:
            self._teller = SendWatch()
        self._told_last = self._teller.watch(_All(messages), lambda _: note())

    def settle(self) -> None:
        """Waits until all that came is noted."""
        if self._told_last is not None:
            self._told_last.wait(EVER)

    def take(self) -> dict[int, LinkUse]:
        """What was noted since this was last asked, by sender. What a busy link tells late counts then."""
        if self._told_last is not None and self._told_last.has_failed:
            self._told_last.wait(EVER)
        with self._lock:
            flights, self._flights = self._flights, defaultdict(list)
        return {
            peer: LinkUse(sum(flight.size_bytes for flight in found), in_flight_s(found))
            for peer, found in sorted(flights.items())
        }

    def close(self) -> None:
        for thread in [*self._threads.values(), *([] if self._teller is None else [self._teller])]:
            thread.close(timeout_s=1.0)
        self._threads.clear()
        self._teller = None


def in_flight_s(flights: Iterable[tuple[float, float, int]]) -> float:
    """The time in which at least one was on its way: several share the link."""
    total_s, until_s = 0.0, float("-inf")
    for began_s, ended_s, _ in sorted(flights):
        total_s += max(0.0, ended_s - max(began_s, until_s))
        until_s = max(until_s, ended_s)
    return total_s


class WatchedMailbox:
    """Another mailbox, for one sum, whose messages are timed."""

    def __init__(self, mailbox: Mailbox, watch: TrafficWatch) -> None:
        self._mailbox, self._watch = mailbox, watch
        self.rank = mailbox.rank
        self._sent: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._received: dict[int, dict[int, tuple[float, int]]] = defaultdict(dict)
        self._ends: dict[int, float] = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self._sent[peer].append((tag, self._watch.clock(time.perf_counter())))
        return self._mailbox.send(tensor, peer, tag)

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Pending:
        self._received[peer][tag] = self._watch.clock(time.perf_counter()), buffer.nbytes
        message = self._mailbox.receive(buffer, peer, tag)
        return self._watch.follow(message, peer, lambda end_s: self._ends.update({tag: self._watch.clock(end_s)}))

    def interrupt(self) -> None:
        self._mailbox.interrupt()

    def finish(self, *, tag: int) -> None:
        """Both ends of every link tell each other when their messages began."""
        told = [torch.tensor(starts, dtype=torch.float64) for starts in self._sent.values()]
        messages = [
            self._mailbox.send(starts.view(-1), peer, tag) for peer, starts in zip(self._sent, told, strict=True)
        ]
        heard = {peer: torch.zeros(2 * len(found), dtype=torch.float64) for peer, found in self._received.items()}
        messages += [self._mailbox.receive(starts, peer, tag) for peer, starts in heard.items()]

        def note() -> None:
            del told[:]  # which had to stay until it had left
            for peer, starts in heard.items():
                self._note(peer, starts)

        self._watch.await_telling(messages, note)

    def _note(self, peer: int, starts: Tensor) -> None:
        for number, began_s in starts.view(-1, 2).tolist():
            ready_s, size_bytes = self._received[peer][int(number)]
            self._watch.note(peer, max(began_s, ready_s), self._ends[int(number)], size_bytes)


class _All:
    """Messages in the form that threads follow."""

    def __init__(self, messages: Sequence[Pending]) -> None:
        self._messages = messages

    def wait(self, _timeout: timedelta) -> None:
        for message in self._messages:
            message.wait()


class _Followed:
    def __init__(self, work: FollowedWork) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait(EVER)
