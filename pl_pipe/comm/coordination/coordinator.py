"""Decides who averages with whom, who may go on, and when all have met. workers' requests -> *Coordinator* -> replies.

It lives on rank 0 behind the process group's store. One thread takes requests out of the store, another decides, so
that a deadline can pass while no request comes; both wait in the kernel.

    worker 3 ── arrive ──► store ──► listener ──► decider ── group {1, 3} ──► store ──► workers 1 and 3
                                        lifelines: worker 2 is gone ──┘

Workers belong to sets, such as the replicas of each pipeline stage. A request means that its worker stands still: it
has at most one without an answer.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_pipe.comm.coordination.mailbox import Mailbox
from pl_pipe.comm.coordination.messages import REQUESTS, group_as_json, joined, packed, replies, unpacked
from pl_pipe.grouping import Group, GroupFormer, GroupRules, RecentGroups, WaveClocks
from pl_pipe.log import get_logger

log = get_logger(__name__)

Sets = Mapping[str, Sequence[int]]
"""Workers by the name of their set."""
_JOIN_S = 10.0


@dataclass
class _Set:
    """Workers that average among themselves."""

    workers: tuple[int, ...]
    former: GroupFormer
    clocks: WaveClocks
    living: set[int] = field(default_factory=set)
    met: dict[int, tuple[str, bytes]] = field(default_factory=dict)
    """Who has come to the present meeting, about what, and with what."""


class Coordinator:
    """Started on one rank; `lost`, `fail` and `close` may be called by any thread."""

    def __init__(
        self, mailbox: Mailbox, sets: Sets, *, rules: GroupRules | None = None, distance: int = 0,
        clock: Callable[[], float] = time.monotonic, patience_s: float = math.inf,
        on_held: Callable[[list[int]], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """
        Args:
            distance: how many waves a worker may be ahead of the slowest of its set.
            on_held: told, every `patience_s` in which someone has waited all the time, who did not wait then.
        """
        self.groups = RecentGroups()
        """What was decided last, for pictures."""
        self.widest = 0
        """The largest distance of clocks between workers that were not waiting."""
        self._mailbox, self._listening = mailbox, mailbox.another()
        self._clock = clock
        self._inbox: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self._failure: str | None = None
        self._patience_s, self._on_held, self._looked_s = patience_s, on_held, clock()
        self._waiting_s: dict[int, float] = {}
        """Since when a worker waits for an answer."""
        self._sets: dict[str, _Set] = {}
        for name, workers in sets.items():
            former = GroupFormer(workers, rules, may_connect=self._nobody_connects)
            clocks = WaveClocks(workers, distance=distance)
            self._sets[name] = _Set(tuple(workers), former, clocks, living=set(workers))
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"coordinator-{target.__name__}")
            for target in (self._listen, self._decide)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def lost(self, worker: int) -> None:
        """The worker has ended: nobody waits for it any longer."""
        self._inbox.put(({"kind": "lost", "worker": worker}, b""))

    def fail(self, text: str) -> None:
        """Everyone who waits, or asks from now on, is told that the run is over."""
        self._inbox.put(({"kind": "fail", "text": text}, b""))

    def close(self) -> None:
        """When no worker will ask any more."""
        if self._threads[0].is_alive():
            self._mailbox.another().put(REQUESTS, packed({"kind": "end"}))
            for thread in self._threads:
                thread.join(_JOIN_S)

    # ---- the threads

    def _listen(self) -> None:
        try:
            while True:
                head, body = unpacked(self._listening.take(REQUESTS))
                self._inbox.put((head, body))
                if head["kind"] == "end":
                    return
        except Exception as error:
            self.fail(f"the coordinator on rank 0 cannot hear the workers: {type(error).__name__}: {error}")

    def _decide(self) -> None:
        while True:
            deadlines_s = [known.former.deadline_s for known in self._sets.values()] + [self._looks_next_s]
            due_s = min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)
            try:
                wait_s = None if due_s is None else due_s - self._clock()
                if wait_s is not None and wait_s <= 0:
                    head, body = self._inbox.get_nowait()
                else:
                    head, body = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                head, body = {"kind": "elapse"}, b""
            if head["kind"] == "end":
                return
            try:
                self._serve(head, body)
            except Exception as error:
                log.error("the coordinator failed", exc_info=error)
                self._tell_failure(f"the coordinator on rank 0 failed: {type(error).__name__}: {error}")

    def _serve(self, head: Mapping[str, Any], body: bytes) -> None:
        kind, now_s = head["kind"], self._clock()
        if kind == "fail":
            self._tell_failure(str(head["text"]))
        elif kind == "elapse":
            for known in self._sets.values():
                self._announce(known.former.elapse(now_s))
            if self._looks_next_s is not None and self._looks_next_s <= now_s:
                self._looked_s = now_s
                self._look_who_is_waited_for(now_s)
        elif kind == "lost":
            for known in self._sets.values():
                self._lose(known, int(head["worker"]), now_s)
        elif self._failure is not None:
            if kind in ("arrive", "tick", "meet"):
                self._reply(int(head["worker"]), {"error": self._failure})
        else:
            self._answer(self._sets[head["set"]], head, body, now_s)

    def _look_who_is_waited_for(self, now_s: float) -> None:
        living = {worker for known in self._sets.values() for worker in known.living}
        held = living - set(self._waiting_s)
        if held:
            self._on_held(sorted(held))
        elif max(self._waiting_s.values()) + self._patience_s <= now_s:  # else some may have come just now
            self._tell_failure(
                f"all ranks have waited for one another for {self._patience_s:g} s; see that hooks between steps meet "
                f"on all ranks alike, or raise timeout_s"
            )

    def _answer(self, known: _Set, head: Mapping[str, Any], body: bytes, now_s: float) -> None:
        kind, worker = head["kind"], int(head["worker"])
        if worker not in known.living:
            return  # it was given up, and speaks no more
        if kind in ("arrive", "tick", "meet"):
            self._waiting_s[worker] = now_s
        if kind == "arrive":
            self._announce(known.former.arrive(worker, now_s, steps=int(head["steps"])))
        elif kind == "tick":
            self._release(known, known.clocks.tick(worker))
        elif kind == "leave":
            self._announce(known.former.leave(worker, now_s))
            self._release(known, known.clocks.leave(worker))
        elif kind == "join":
            known.former.join(worker)
            known.clocks.join(worker)
        elif kind == "reunited":
            known.former.reunited(known.living)
            known.clocks.reunited(known.living)
        elif kind == "meet":
            known.met[worker] = head["about"], body
            self._end_meeting(known)
        else:
            raise ValueError(f"a request of kind {kind!r}")

    def _lose(self, known: _Set, worker: int, now_s: float) -> None:
        if worker not in known.living:
            return
        known.living.discard(worker)
        self._waiting_s.pop(worker, None)
        known.met.pop(worker, None)
        self._announce(known.former.leave(worker, now_s))
        self._release(known, known.clocks.leave(worker))
        self._end_meeting(known)

    def _end_meeting(self, known: _Set) -> None:
        if not known.met or len(known.met) < len(known.living):
            return
        members = sorted(known.met)
        if len({about for about, _ in known.met.values()}) > 1:
            self._tell_failure(_at_odds({worker: known.met[worker][0] for worker in members}))
            return
        lengths, body = joined(known.met[worker][1] for worker in members)
        known.met.clear()
        for worker in members:
            self._reply(worker, {"members": members, "lengths": lengths}, body)

    def _announce(self, groups: Sequence[Group]) -> None:
        self.groups.add(groups)
        for group in groups:
            for worker in group.members:
                self._reply(worker, {"group": group_as_json(group)})

    def _release(self, known: _Set, workers: Sequence[int]) -> None:
        clocks = known.clocks
        for worker in workers:
            ahead = clocks.clocks[worker] - clocks.least
            self.widest = max(self.widest, ahead)
            self._reply(worker, {"clock": clocks.clocks[worker], "ahead": ahead})

    def _tell_failure(self, text: str) -> None:
        if self._failure is None:
            self._failure = text
            for known in self._sets.values():
                for worker in {*known.former.ready, *known.clocks.waiting, *known.met}:
                    self._reply(worker, {"error": text})

    def _reply(self, worker: int, head: Mapping[str, Any], body: bytes = b"") -> None:
        self._waiting_s.pop(worker, None)
        self._mailbox.put(replies(worker), packed(head, body))

    @property
    def _looks_next_s(self) -> float | None:
        """When someone will have waited for too long."""
        if not self._waiting_s or self._patience_s == math.inf:
            return None
        return max(self._looked_s, min(self._waiting_s.values())) + self._patience_s

    def _nobody_connects(self) -> bool:
        return not any(known.former.is_connecting for known in self._sets.values())


def _at_odds(abouts: Mapping[int, str]) -> str:
    """Two workers that wait for each other at different points."""
    first, *others = abouts
    other = next(worker for worker in others if abouts[worker] != abouts[first])
    return (
        f"rank {first} has come to {abouts[first]} and rank {other} to {abouts[other]}; see that hooks between steps "
        f"log with sync_dist=True, reduce, gather and broadcast on all ranks alike"
    )
