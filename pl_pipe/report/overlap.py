"""How much of its messages' time a pipeline computes through. MeasuredRun -> *overlap* -> comparison, benchmarks.

rank 1    forward 4 ════════  backward 2 ═══════════      ════
link           ── in ───   ── out ──        ── in ──────────
               hidden      hidden           hidden  │ not: the rank stands still
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pl_pipe.events import Event
from pl_pipe.report.measured_run import MeasuredRun

_Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Overlap:
    """Over all ranks, in the steady part of a run."""

    under_way_s: float
    """Messages to or from a rank were under way."""
    hidden_s: float
    """Of that, the rank computed meanwhile."""

    @property
    def share(self) -> float:
        return self.hidden_s / self.under_way_s if self.under_way_s else 1.0


def overlap(run: MeasuredRun) -> Overlap | None:
    """None where the run is too short to have a steady part."""
    pace = run.pace
    if pace is None:
        return None
    ends_s = {
        batch: max(event.end_s for event in run.events if event.batch == batch and event.kind == "backward")
        for batch in (pace.first, pace.last)
    }
    window = (ends_s[pace.first], ends_s[pace.last])
    under_way_s = hidden_s = 0.0
    for rank in sorted({event.rank for event in run.events}):
        link = _within(_links(run.events, rank), window)
        under_way_s += _length(link)
        hidden_s += _length(_both(link, _computing(run.events, rank)))
    return Overlap(under_way_s, hidden_s)


def _links(events: Sequence[Event], rank: int) -> _Spans:
    return _merged((e.start_s, e.end_s) for e in events if e.kind == "send" and rank in (e.rank, e.peer))


def _computing(events: Sequence[Event], rank: int) -> _Spans:
    """Forwards and backwards, less the waits in them."""
    mine = [event for event in events if event.rank == rank]
    busy = _merged((e.start_s, e.end_s) for e in mine if e.kind in ("forward", "backward"))
    waits = _merged((e.start_s, e.end_s) for e in mine if e.kind == "receive")
    found: _Spans = []
    for start_s, end_s in busy:
        for wait_start_s, wait_end_s in waits:
            if start_s < wait_end_s and wait_start_s < end_s:
                found.append((start_s, max(start_s, wait_start_s)))
                start_s = max(start_s, wait_end_s)
        found.append((start_s, max(start_s, end_s)))
    return found


def _merged(spans: Iterable[tuple[float, float]]) -> _Spans:
    merged: _Spans = []
    for start_s, end_s in sorted(spans):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _both(one: _Spans, other: _Spans) -> _Spans:
    return [span for a in one for span in _within(other, a)]


def _within(spans: _Spans, window: tuple[float, float]) -> _Spans:
    clipped = ((max(start_s, window[0]), min(end_s, window[1])) for start_s, end_s in spans)
    return [(start_s, end_s) for start_s, end_s in clipped if start_s < end_s]


def _length(spans: _Spans) -> float:
    return sum(end_s - start_s for start_s, end_s in spans)
