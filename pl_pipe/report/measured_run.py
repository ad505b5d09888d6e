"""A pipeline's run as recorded, and its file `timeline.json`. PipelineTimeline -> *MeasuredRun* -> comparison."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pl_pipe.errors import PlPipeError, RunError
from pl_pipe.events import Event
from pl_pipe.json_file import check_schema, read_json
from pl_pipe.partition import Plan
from pl_pipe.schedule import FLUSHING
from pl_pipe.simulate.prediction import Pace, Stretch, has_times, pace, predicted_events, stretches

SCHEMA = 1
_REMEDY = "record one with the callback PipelineTimeline"
_COLUMNS = ("rank", "kind", "start_s", "end_s", "batch", "stage", "peer", "size_bytes")
_DIGITS = 9  # of a second


@dataclass(frozen=True)
class MeasuredRun:
    """Events of all ranks for the mini-batches from `first` until `end`; time 0 is when the first of them began."""

    schedule: str
    update_every: int
    """Mini-batches that share an update."""
    first: int
    end: int
    drained: bool
    """Whether the pipeline was empty behind the last of them."""
    segments: tuple[int, ...]
    """Mini-batches that entered an empty pipeline."""
    clock_error_s: float
    """By how much the clocks of two ranks may differ."""
    plan: Plan | None
    """None for a run with one rank."""
    events: tuple[Event, ...]

    @classmethod
    def starting_at_zero(cls, *, events: Sequence[Event], **facts: Any) -> "MeasuredRun":
        start_s = min((event.start_s for event in events), default=0.0)
        shifted = (replace(event, start_s=event.start_s - start_s, end_s=event.end_s - start_s) for event in events)
        return cls(events=tuple(sorted(shifted, key=_in_time)), **facts)

    @property
    def stretches(self) -> list[Stretch]:
        return stretches(self.segments, first=self.first, end=self.end, drained=self.drained)

    @cached_property
    def predicted(self) -> tuple[Event, ...]:
        """The simulator's events for the same mini-batches; none where the plan has no times."""
        if self.plan is None or not has_times(self.plan):
            return ()
        return predicted_events(
            self.plan, self.events, self.stretches, schedule=self.schedule, update_every=self.update_every
        )

    @property
    def pace(self) -> Pace | None:
        """Of the longest stretch, the last one of several; None if that is too short to have one."""
        longest = max(self.stretches, key=lambda stretch: (stretch.end - stretch.first, stretch.first))
        deep = 0 if self.plan is None or self.schedule in FLUSHING else self.plan.ranks
        return pace(self.events, self.predicted, longest, in_flight=deep, update_every=self.update_every)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "schedule": self.schedule,
            "update_every": self.update_every,
            "first": self.first,
            "end": self.end,
            "drained": self.drained,
            "segments": list(self.segments),
            "clock_error_s": self.clock_error_s,
            "plan": None if self.plan is None else self.plan.as_json(),
            "columns": list(_COLUMNS),
            "events": [_row(event) for event in self.events],
        }

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> "MeasuredRun":
        check_schema(content, SCHEMA, source=source, what="timeline", error=RunError, remedy=_REMEDY)
        try:
            plan = content["plan"]
            return cls(
                schedule=str(content["schedule"]),
                update_every=int(content["update_every"]),
                first=int(content["first"]),
                end=int(content["end"]),
                drained=bool(content["drained"]),
                segments=tuple(int(number) for number in content["segments"]),
                clock_error_s=float(content["clock_error_s"]),
                plan=None if plan is None else Plan.from_json(plan, source=source),
                events=tuple(
                    Event(**dict(zip(content["columns"], row, strict=True))) for row in content["events"]
                ),
            )  # fmt: skip
        except PlPipeError as error:
            raise RunError(f"{source} cannot be used: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"{source} cannot be read as a timeline: {error!r}; {_REMEDY}") from error


def write_run(run: MeasuredRun, path: Path) -> None:
    path.write_text(json.dumps(run.as_json(), separators=(",", ":")) + "\n")


def read_run(path: Path) -> MeasuredRun:
    content = read_json(path, name=str(path), error=RunError, remedy=_REMEDY)
    return MeasuredRun.from_json(content, source=str(path))


def _row(event: Event) -> list[Any]:
    return [
        round(value, _DIGITS) if isinstance(value, float) else value
        for value in (getattr(event, name) for name in _COLUMNS)
    ]


def _in_time(event: Event) -> tuple[float, int, float]:
    return event.start_s, event.rank, -event.end_s
