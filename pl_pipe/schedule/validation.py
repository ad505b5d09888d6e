"""Proves that programs can be run: order, messages, no deadlock, bounds. schedule -> *validation* -> runtime."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pl_pipe.errors import ScheduleError
from pl_pipe.schedule.actions import (
    BACKWARD,
    COMPUTES,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    RECEIVES,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    SENDS,
    UPDATE,
    Action,
    Kind,
)
from pl_pipe.schedule.programs import Programs
from pl_pipe.schedule.versions import weight_versions
from pl_pipe.schedule.walk import Message, message_of, walk

_KINDS = (
    RECEIVE_ACTIVATION,
    FORWARD,
    SEND_ACTIVATION,
    RECEIVE_GRADIENT,
    BACKWARD,
    SEND_GRADIENT,
    UPDATE,
)
_PHASE = {kind: phase for phase, kind in enumerate(_KINDS)}  # of a mini-batch's actions, none goes back a phase


@dataclass(frozen=True)
class ScheduleReport:
    """What was found while proving programs right."""

    actions: int
    messages: int
    updates: tuple[int, ...]
    """By stage."""
    max_in_flight: Mapping[int, int]
    """By rank: mini-batches between forward and backward at a time."""
    weight_versions: Mapping[int, int]
    """By rank: versions of the weights kept at a time."""
    max_staleness: tuple[int, ...]
    """By stage: updates between the weights of a gradient and those it is applied to."""


def validate(programs: Programs) -> ScheduleReport:
    """Raises ScheduleError unless every rank can run its program to the end; takes time linear in the actions.

    Each mini-batch has one forward and one backward on its replica of each stage, its messages in order around them,
    and its gradient in the right update; every send has one receive; ranks never wait for each other for ever; and no
    rank keeps more in flight than the schedule's bound.
    """
    in_flight = {rank: _check_order(programs, rank) for rank in programs.by_rank}
    _check_replicas(programs)
    messages = _check_messages(programs)
    for _ in walk(programs):
        pass
    versions = weight_versions(programs)
    return ScheduleReport(
        actions=programs.actions,
        messages=messages,
        updates=tuple(map(len, programs.update_members)),
        max_in_flight=in_flight,
        weight_versions={rank: found.kept for rank, found in versions.items()},
        max_staleness=tuple(max(versions[rank].max_staleness for rank in ranks) for ranks in programs.stages),
    )


def _check_order(programs: Programs, rank: int) -> int:
    """Checks a rank by itself; returns the most it keeps in flight."""
    every = programs.update_every[programs.stage_of[rank]]
    bound = programs.in_flight[rank]
    phase: dict[int, int] = {}
    gathered: list[int] = []
    flying = most = 0
    for action in programs.by_rank[rank]:
        kind, batch = action.kind, action.batch
        before, now = phase.get(batch, 0), _PHASE[kind]
        if now == before and kind in COMPUTES:
            raise ScheduleError(f"rank {rank} runs {action} twice; run it once")
        if now < before:
            raise ScheduleError(f"rank {rank} runs {action} behind {_KINDS[before].value}{batch}; it belongs before")
        missing = FORWARD if before < 1 < now else BACKWARD if before < 4 < now else None
        if missing is not None:
            raise ScheduleError(f"rank {rank} runs {action} before {missing.value}{batch}; it belongs behind")
        phase[batch] = now
        if kind is FORWARD:
            flying += 1
            most = max(most, flying)
            if flying > bound:
                raise ScheduleError(
                    f"rank {rank} has {flying} mini-batches in flight at {action}, and its bound is {bound}; "
                    "run a backward before"
                )
        elif kind is BACKWARD:
            flying -= 1
            gathered.append(batch)
        elif kind is UPDATE:
            _check_update(rank, action, gathered, every)
            gathered = []
    for batch, reached in phase.items():
        if reached < 4:
            raise ScheduleError(f"rank {rank} never runs B{batch}; every mini-batch takes a forward and a backward")
    if gathered:
        raise ScheduleError(f"rank {rank} never applies the gradient of B{gathered[-1]}; end with U{gathered[-1]}")
    return most


def _check_update(rank: int, action: Action, gathered: Sequence[int], every: int) -> None:
    """An update applies all mini-batches of one group that the rank has, and nothing else."""
    if not gathered or gathered[-1] != action.batch:
        raise ScheduleError(
            f"rank {rank} runs {action} where the last backward is "
            f"{f'B{gathered[-1]}' if gathered else 'already applied'}; an update stands behind the last one it gathers"
        )
    groups = {batch // every for batch in gathered}
    if len(groups) > 1:
        raise ScheduleError(
            f"rank {rank} gathers mini-batches {', '.join(map(str, gathered))} in {action}, but {every} consecutive "
            "ones share an update; update between them"
        )


def _check_replicas(programs: Programs) -> None:
    """Every stage runs every mini-batch, each on the replica whose turn it is."""
    for stage, ranks in enumerate(programs.stages):
        for place, rank in enumerate(ranks):
            program = programs.by_rank[rank]
            found = {action.batch for action in program if action.kind is FORWARD}
            wanted = set(range(place, programs.batches, len(ranks)))
            if found != wanted:
                batch = min(found ^ wanted)
                fault = "lacks" if batch in wanted else "should not run"
                raise ScheduleError(
                    f"rank {rank} {fault} F{batch}; replica {place} of {len(ranks)} of stage {stage} runs every "
                    f"{len(ranks)}th mini-batch from {place}, under {programs.batches}"
                )
            applied = [action.batch // programs.update_every[stage] for action in program if action.kind is UPDATE]
            if applied != sorted(set(applied)):
                raise ScheduleError(f"rank {rank} applies mini-batches of one update in several; gather them first")


def _check_messages(programs: Programs) -> int:
    """Pairs sends with receives; returns how many there are."""
    sends = _messages(programs, SENDS)
    receives = _messages(programs, RECEIVES)
    for message in sorted(sends.keys() ^ receives.keys()):
        _, _, source, target = message
        if message in sends:
            rank, action, other = source, sends[message], f"rank {target} never receives it"
        else:
            rank, action, other = target, receives[message], f"rank {source} never sends it"
        raise ScheduleError(f"rank {rank} runs {action}, but {other}; every send takes one receive")
    return len(sends)


def _messages(programs: Programs, kinds: frozenset[Kind]) -> dict[Message, Action]:
    found: dict[Message, Action] = {}
    for rank, action in _actions(programs):
        if action.kind in kinds:
            message = message_of(rank, action)
            if message in found:
                raise ScheduleError(f"rank {rank} runs {action} twice; a message is sent and received once")
            found[message] = action
    return found


def _actions(programs: Programs) -> Iterator[tuple[int, Action]]:
    for rank, program in programs.by_rank.items():
        for action in program:
            yield rank, action
