"""Events as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing. events -> *trace*.

A process is a rank. Its first thread is what it computes, with its waits inside; the others are the link out of it,
one more wherever messages and all-reduces go on at the same time. A prediction's ranks follow as further processes.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.events import Event

MICROSECONDS = 1e6
LETTERS = {"forward": "F", "backward": "B", "update": "U", "all_reduce": "AR"}
ON_LINK = frozenset({"send", "all_reduce"})


def event_name(event: Event, stage_of: dict[int, int]) -> str:
    """`F3`, `B3`, `U3`, `SA3>5` for an activation, `SG3>0` for a gradient, `AR3` for an all-reduce, `RA3<0`, `RG3<5`
    for waits."""
    if event.kind not in ("send", "receive") or event.peer is None:
        return f"{LETTERS.get(event.kind, event.kind)}{event.batch}"
    later = stage_of.get(event.peer, event.stage + 1) > event.stage
    if event.kind == "send":
        return f"{'SA' if later else 'SG'}{event.batch}>{event.peer}"
    return f"{'RG' if later else 'RA'}{event.batch}<{event.peer}"


def write_trace(events: Iterable[Event], path: Path, *, predicted: Iterable[Event] = ()) -> None:
    """Writes `path` as JSON; times are microseconds and stand in order. `predicted` is another run of the ranks."""
    measured, others = list(events), list(predicted)
    beyond = 1 + max((event.rank for event in (*measured, *others)), default=0)
    names, spans = _described(measured, first=0, prefix="")
    other_names, other_spans = _described(others, first=beyond, prefix="predicted ")
    ordered = sorted([*spans, *other_spans], key=lambda span: span["ts"])
    content = {"traceEvents": [*names, *other_names, *ordered], "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _described(
    events: Sequence[Event], *, first: int, prefix: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Names and spans; processes are numbered from `first`."""
    ordered = sorted(events, key=lambda event: (event.start_s, event.rank, -event.end_s))
    stage_of = {event.rank: event.stage for event in ordered}
    lanes: dict[int, list[float]] = {rank: [] for rank in stage_of}
    spans = [_span(event, stage_of, lanes[event.rank]) for event in ordered]
    names = _names(stage_of, lanes, prefix)
    for entry in (*names, *spans):
        entry["pid"] += first
        if entry["name"] == "process_sort_index":
            entry["args"]["sort_index"] += first
    return names, spans


def _span(event: Event, stage_of: dict[int, int], lanes: list[float]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch": event.batch, "stage": event.stage}
    if event.peer is not None:
        arguments["peer"] = event.peer
    if event.kind in ON_LINK or event.kind == "receive":
        arguments["bytes"] = event.size_bytes
    return {
        "name": event_name(event, stage_of),
        "cat": event.kind,
        "ph": "X",
        "ts": event.start_s * MICROSECONDS,
        "dur": event.duration_s * MICROSECONDS,
        "pid": event.rank,
        "tid": 1 + _lane(event, lanes) if event.kind in ON_LINK else 0,
        "args": arguments,
    }


def _lane(event: Event, lanes: list[float]) -> int:
    """The first lane that is free at the event's start; a viewer cannot show two at a time on one."""
    for lane, free_s in enumerate(lanes):
        if free_s <= event.start_s:
            lanes[lane] = event.end_s
            return lane
    lanes.append(event.end_s)
    return len(lanes) - 1


def _names(stage_of: dict[int, int], lanes: dict[int, list[float]], prefix: str) -> list[dict[str, Any]]:
    """Names of processes and threads, and the order of the pipeline."""
    found: list[dict[str, Any]] = []
    for place, rank in enumerate(sorted(stage_of, key=lambda rank: (stage_of[rank], rank))):
        about = {
            "process_name": {"name": f"{prefix}stage {stage_of[rank]} rank {rank}"},
            "process_sort_index": {"sort_index": place},
        }
        for kind, arguments in about.items():
            found.append({"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": 0, "args": arguments})
        threads = [
            "compute",
            *("link" if lane == 0 else f"link {lane + 1}" for lane in range(max(len(lanes[rank]), 1))),
        ]
        for thread, name in enumerate(threads):
            arguments = {"name": name}
            found.append({"name": "thread_name", "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": arguments})
    return found
