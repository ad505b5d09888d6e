"""Events as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing. events -> *trace*.

A process is a rank. Its first thread is what it computes; the others are the link out of it, one more wherever
messages and all-reduces go on at the same time.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pl_pipe.events import Event

MICROSECONDS = 1e6
LETTERS = {"forward": "F", "backward": "B", "update": "U", "all_reduce": "AR"}
ON_LINK = frozenset({"send", "all_reduce"})


def event_name(event: Event, stage_of: dict[int, int]) -> str:
    """`F3`, `B3`, `U3`, `SA3>5` for an activation, `SG3>0` for a gradient, `AR3` for an all-reduce."""
    if event.kind != "send" or event.peer is None:
        return f"{LETTERS.get(event.kind, event.kind)}{event.batch}"
    onward = stage_of.get(event.peer, event.stage + 1) > event.stage
    return f"{'SA' if onward else 'SG'}{event.batch}>{event.peer}"


def write_trace(events: Iterable[Event], path: Path) -> None:
    """Writes `path` as JSON; times are microseconds and stand in order."""
    ordered = sorted(events, key=lambda event: (event.start_s, event.rank, -event.end_s))
    stage_of = {event.rank: event.stage for event in ordered}
    lanes: dict[int, list[float]] = {rank: [] for rank in stage_of}
    spans = [_span(event, stage_of, lanes[event.rank]) for event in ordered]
    content = {"traceEvents": [*_names(stage_of, lanes), *spans], "displayTimeUnit": "ms"}
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def _span(event: Event, stage_of: dict[int, int], lanes: list[float]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch": event.batch, "stage": event.stage}
    if event.peer is not None:
        arguments["peer"] = event.peer
    if event.kind in ON_LINK:
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


def _names(stage_of: dict[int, int], lanes: dict[int, list[float]]) -> list[dict[str, Any]]:
    """Names of processes and threads, and the order of the pipeline."""
    found: list[dict[str, Any]] = []
    for place, rank in enumerate(sorted(stage_of, key=lambda rank: (stage_of[rank], rank))):
        about = {
            "process_name": {"name": f"stage {stage_of[rank]} rank {rank}"},
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
