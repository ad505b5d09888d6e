"""One thing a rank does, and its text form. plan -> *schedule* -> simulate, runtime.

    F3      forward of mini-batch 3             B3      backward of mini-batch 3
    SA3>5   send its activation to rank 5       SG3>0   send its gradient to rank 0
    RA3<0   receive its activation from rank 0  RG3<5   receive its gradient from rank 5
    U3      apply the gradients gathered so far; 3 is the last mini-batch among them

A program is such actions in order, parted by spaces: `RA3<0 F3 SA3>5 RG3<5 B3 SG3>0 U3`.
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from pl_pipe.errors import ScheduleError


class Kind(Enum):
    """What an action does; the value is its letters in text."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"
    SEND_ACTIVATION = "SA"
    RECEIVE_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECEIVE_GRADIENT = "RG"

    __hash__ = object.__hash__  # members are alone of their value, and Enum's own hash is slow Python


# Loops over millions of actions name the kinds so: a look-up on an Enum class costs as much as the rest of the loop.
FORWARD, BACKWARD, UPDATE, SEND_ACTIVATION, RECEIVE_ACTIVATION, SEND_GRADIENT, RECEIVE_GRADIENT = Kind

COMPUTES = frozenset({FORWARD, BACKWARD, UPDATE})
SENDS = frozenset({SEND_ACTIVATION, SEND_GRADIENT})
RECEIVES = frozenset({RECEIVE_ACTIVATION, RECEIVE_GRADIENT})
_KINDS = {kind.value: kind for kind in Kind}
_FORM = re.compile(r"(SA|SG|RA|RG|F|B|U)(\d+)(?:([<>])(\d+))?")


class Action(NamedTuple):
    """One step of a rank's program. A named tuple, because programs of large clusters hold millions."""

    kind: Kind
    batch: int
    """Counted through the whole schedule, over all replicas."""
    peer: int | None = None
    """The rank at the other end of a send or receive."""

    def __str__(self) -> str:
        if self.peer is None:
            return f"{self.kind.value}{self.batch}"
        return f"{self.kind.value}{self.batch}{'>' if self.kind in SENDS else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """The action that `str()` writes as `text`."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ScheduleError(f"{text!r} is no action; actions look like F3, B3, U3, SA3>5, RA3<0, SG3>0 or RG3<5")
    letters, batch, sign, peer = found.groups()
    kind = _KINDS[letters]
    expected = ">" if kind in SENDS else "<" if kind in RECEIVES else None
    if sign != expected:
        form = f"{letters}{batch}{expected}RANK" if expected else f"{letters}{batch}"
        raise ScheduleError(f"{text!r} is no action; {kind.name.lower()} is written {form}")
    return Action(kind, int(batch), int(peer) if peer is not None else None)


def format_program(program: Iterable[Action]) -> str:
    """`F0 SA0>1 RG0<1 B0 U0`"""
    return " ".join(map(str, program))


def parse_program(text: str) -> tuple[Action, ...]:
    return tuple(map(parse_action, text.split()))


def format_programs(by_rank: Mapping[int, Iterable[Action]]) -> str:
    """A line for each rank: `0: F0 SA0>1 …`"""
    return "\n".join(f"{rank}: {format_program(program)}".rstrip() for rank, program in by_rank.items())


def parse_programs(text: str) -> dict[int, tuple[Action, ...]]:
    """The programs by rank that `format_programs` wrote; empty lines are skipped."""
    programs: dict[int, tuple[Action, ...]] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        rank, colon, program = line.partition(":")
        if not colon or not rank.strip().isdecimal():
            raise ScheduleError(f"the line {line[:40]!r} names no rank; a program's line begins with one, as `0: F0 …`")
        if int(rank) in programs:
            raise ScheduleError(f"rank {int(rank)} has two programs; give it one line")
        programs[int(rank)] = parse_program(program)
    return programs
