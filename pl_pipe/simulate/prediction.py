"""What the simulator says of a run that was measured, and both paces. Plan, measured events -> *prediction* -> report.

A run fills and drains several times: before validations, checkpoints and the ends of epochs. Each stretch between is
simulated by itself and laid where the measured one began, so that what Lightning does between them is in neither.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pl_pipe.events import Event
from pl_pipe.partition import Plan
from pl_pipe.schedule import build_programs
from pl_pipe.simulate.options import SimulationOptions
from pl_pipe.simulate.simulation import simulate


@dataclass(frozen=True)
class Stretch:
    """Mini-batches `first` to `end`, which entered a pipeline that was last empty before mini-batch `filled_from`."""

    filled_from: int
    first: int
    end: int
    drained: bool
    """Whether nothing followed before the pipeline was empty again."""


@dataclass(frozen=True)
class Pace:
    """Time between the ends of mini-batches, over the steady part of a run."""

    first: int
    last: int
    measured_s: float
    predicted_s: float | None
    """None where the plan has no times."""


def has_times(plan: Plan) -> bool:
    """Whether the plan was made from measured costs; split points alone say nothing about times."""
    return any(stage.compute_s > 0 for stage in plan.stages)


def stretches(segments: Sequence[int], *, first: int, end: int, drained: bool) -> list[Stretch]:
    """The mini-batches from `first` until `end`, parted at `segments`: those that entered an empty pipeline."""
    starts = sorted({*segments} or {first})
    found = []
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        until = end if following is None else following
        found.append(Stretch(start, max(start, first), until, drained or following is not None))
    return found


def predicted_events(
    plan: Plan, measured: Sequence[Event], stretches: Sequence[Stretch], *, schedule: str, update_every: int
) -> tuple[Event, ...]:
    """The simulator's events of the same mini-batches, in the order of time."""
    begins_s = _entries(measured)
    found: list[Event] = []
    for stretch in stretches:
        events = _simulated(plan, stretch, schedule, update_every)
        start_s = _entries(events)[stretch.first]
        shift_s = begins_s.get(stretch.first, start_s) - start_s
        found += [replace(event, start_s=event.start_s + shift_s, end_s=event.end_s + shift_s) for event in events]
    return tuple(sorted(found, key=lambda event: (event.start_s, event.rank)))


def pace(
    measured: Sequence[Event], predicted: Sequence[Event], stretch: Stretch, *, in_flight: int, update_every: int
) -> Pace | None:
    """Both over the same mini-batches: the second half of what ends before the pipeline drains, in whole updates.

    None where the stretch is too short for that. `in_flight` is how many mini-batches the drain finishes; 0 for
    schedules that drain at every update, whose pace includes that.
    """
    measured_s, predicted_s = _ends(measured), _ends(predicted)
    last = stretch.end - 1 - (in_flight if stretch.drained else 0)
    last -= (last + 1 - stretch.filled_from) % update_every
    count = (last - stretch.first) // 2 // update_every * update_every
    if count < 1 or last not in measured_s or last - count not in measured_s:
        return None
    known = last in predicted_s and last - count in predicted_s
    return Pace(
        first=last - count,
        last=last,
        measured_s=(measured_s[last] - measured_s[last - count]) / count,
        predicted_s=(predicted_s[last] - predicted_s[last - count]) / count if known else None,
    )


def _simulated(plan: Plan, stretch: Stretch, schedule: str, update_every: int) -> list[Event]:
    """The stretch's own events. A pipeline that was full before is filled first, and one that goes on is kept full."""
    whole = math.lcm(update_every, plan.round)
    full = -(-3 * plan.ranks // whole) * whole
    before = stretch.first - stretch.filled_from
    if before > full:
        before = full + (before - full) % whole
    count = stretch.end - stretch.first
    programs = build_programs(
        plan,
        schedule=schedule,
        batches=before + count + (0 if stretch.drained else full),
        accumulate=None if schedule == "pipedream" else update_every,
        update="round" if update_every % plan.round == 0 else "minibatch",
    )
    shift = stretch.first - before
    return [
        replace(event, batch=event.batch + shift)
        for event in simulate(plan, programs, options=SimulationOptions()).events
        if before <= event.batch < before + count
    ]


def _entries(events: Sequence[Event]) -> dict[int, float]:
    """By mini-batch, when the first stage began with it: later ones begin by waiting."""
    first = min((event.stage for event in events), default=0)
    return {event.batch: event.start_s for event in events if event.kind == "forward" and event.stage == first}


def _ends(events: Sequence[Event]) -> Mapping[int, float]:
    """By mini-batch, when the last of its backwards ended."""
    found: dict[int, float] = {}
    for event in events:
        if event.kind == "backward":
            found[event.batch] = max(found.get(event.batch, -math.inf), event.end_s)
    return found
