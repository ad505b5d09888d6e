"""Runs programs without costs: who waits for whom, and since when. programs -> *walk* -> validation, grid.

Sends do not block, receives do, and the updates of a stage's replicas wait for each other. Each rank follows its own
order, so the dates found do not depend on which rank is walked first, and each action is visited once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pl_pipe.errors import ScheduleError
from pl_pipe.schedule.actions import (
    BACKWARD,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    UPDATE,
    Action,
)
from pl_pipe.schedule.programs import Programs

SHOWN = 32
_SENT_AS = {RECEIVE_ACTIVATION: SEND_ACTIVATION, RECEIVE_GRADIENT: SEND_GRADIENT}

Message: TypeAlias = tuple[bool, int, int, int]
"""(is it a gradient, mini-batch, sender, receiver)"""


class Step(NamedTuple):
    """A compute action with its dates, in the units of the durations given."""

    rank: int
    action: Action
    start: int
    end: int


def message_of(rank: int, action: Action) -> Message:
    """What a send and its receive have in common."""
    peer = action.peer
    assert peer is not None, f"{action} has no peer"
    if action.kind is SEND_ACTIVATION:
        return False, action.batch, rank, peer
    if action.kind is RECEIVE_ACTIVATION:
        return False, action.batch, peer, rank
    if action.kind is SEND_GRADIENT:
        return True, action.batch, rank, peer
    return True, action.batch, peer, rank


@dataclass
class _Gathering:
    """An update that some replicas have reached."""

    members: tuple[int, ...]
    reached: dict[int, int] = field(default_factory=dict)
    """Dates by rank."""


class _Walker:
    def __init__(self, programs: Programs, forward: int, backward: int) -> None:
        self.programs = programs
        self.lasts = {FORWARD: forward, BACKWARD: backward}
        self.place = dict.fromkeys(programs.by_rank, 0)
        self.date = dict.fromkeys(programs.by_rank, 0)
        self.sent: dict[Message, int] = {}
        self.waiting: dict[Message, int] = {}
        self.updates = dict.fromkeys(programs.by_rank, 0)
        self.gatherings = [[_Gathering(members) for members in ordinals] for ordinals in programs.update_members]
        self.ready = list(programs.by_rank)

    def steps(self) -> Iterator[Step]:
        while self.ready:
            yield from self._advance(self.ready.pop())
        if any(self.place[rank] < len(program) for rank, program in self.programs.by_rank.items()):
            raise ScheduleError(self._stuck())

    def _advance(self, rank: int) -> Iterator[Step]:
        """Follows a rank's program until it must wait."""
        program = self.programs.by_rank[rank]
        while self.place[rank] < len(program):
            action = program[self.place[rank]]
            kind = action.kind
            if kind is FORWARD or kind is BACKWARD:
                start = self.date[rank]
                self.date[rank] = start + self.lasts[kind]
                yield Step(rank, action, start, self.date[rank])
            elif kind is UPDATE:
                if not self._gather(rank):
                    return
                continue  # the last member has moved all of them on, this one too
            elif kind is SEND_ACTIVATION or kind is SEND_GRADIENT:
                message = message_of(rank, action)
                self.sent[message] = self.date[rank]
                if message in self.waiting:
                    self.ready.append(self.waiting.pop(message))
            else:
                message = message_of(rank, action)
                if message not in self.sent:
                    self.waiting[message] = rank
                    return
                self.date[rank] = max(self.date[rank], self.sent.pop(message))
            self.place[rank] += 1

    def _gather(self, rank: int) -> bool:
        """Whether `rank` is the last of its update's members to come; it then takes the others along."""
        gathering = self.gatherings[self.programs.stage_of[rank]][self.updates[rank]]
        gathering.reached[rank] = self.date[rank]
        if len(gathering.reached) < len(gathering.members):
            return False
        date = max(gathering.reached.values())
        for member in gathering.members:
            self.date[member] = date
            self.place[member] += 1
            self.updates[member] += 1
            if member != rank:
                self.ready.append(member)
        return True

    def _stuck(self) -> str:
        lines = []
        for rank, program in self.programs.by_rank.items():
            if self.place[rank] == len(program):
                continue
            action = program[self.place[rank]]
            if action.kind is UPDATE:
                gathering = self.gatherings[self.programs.stage_of[rank]][self.updates[rank]]
                missing = [str(member) for member in gathering.members if member not in gathering.reached]
                lines.append(f"rank {rank} at {action} waits for the update of rank {', '.join(missing)}")
            else:
                sent = Action(_SENT_AS[action.kind], action.batch, rank)
                lines.append(f"rank {rank} at {action} waits for {sent} of rank {action.peer}")
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        return (
            f"{len(lines)} of {len(self.programs.by_rank)} ranks wait for ever: {'; '.join(lines[:SHOWN])}{more}; "
            "move these sends and updates before what waits for them"
        )


def walk(programs: Programs, *, forward: int = 0, backward: int = 0) -> Iterator[Step]:
    """Forwards and backwards with their earliest dates, each rank's in order; raises where ranks wait for ever."""
    return _Walker(programs, forward, backward).steps()
