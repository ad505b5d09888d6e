"""Timelines and traces: what stands in the pictures and files, not only that they exist."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pl_pipe.cluster import Cluster
from pl_pipe.events import Event
from pl_pipe.report import timeline
from pl_pipe.report.timeline import Panel, draw_panels, draw_sweep, draw_timeline
from pl_pipe.report.trace import write_trace
from pl_pipe.schedule import build_programs
from pl_pipe.simulate import SweepPoint, simulate
from tests.test_schedule import plan_of

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def events() -> tuple[Event, ...]:
    """Two replicas and one, with messages and all-reduces; rank 0 stands in the last stage."""
    plan = plan_of(
        (2, 1), costs_s=[(0.010, 0.020), (0.004, 0.008)], size_bytes=2000, parameter_bytes=1000, ranks=(1, 2, 0),
        cluster=Cluster.flat(3, 1e6),
    )  # fmt: skip
    return simulate(plan, build_programs(plan, schedule="pipedream", batches=10)).events


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they were when saved."""
    kept: list[Figure] = []
    real = timeline.figure

    @contextmanager
    def keeping(path: Path, *, width: float, height: float) -> Iterator[Figure]:
        with real(path, width=width, height=height) as figure:
            yield figure
            kept.append(figure)

    monkeypatch.setattr(timeline, "figure", keeping)
    return kept


def labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def spans(figure: Figure, kind: str) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of the bars of a kind, found by its colour."""
    found = []
    for bars in figure.axes[0].collections:
        colour = bars.get_facecolor()[0]
        if tuple(round(255 * float(part)) for part in colour[:3]) == bytes_of(timeline.COLOURS[kind]):
            for path in bars.get_paths():
                (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found.append((float(left), float(right), float(low), float(high)))
    return sorted(found)


def bytes_of(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.lstrip("#")))


def test_a_timeline_is_a_png_with_every_forward_and_backward(
    events: tuple[Event, ...], drawn: list[Figure], tmp_path: Path
) -> None:
    draw_timeline(events, tmp_path / "timeline.png", title="two and one")
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    (figure,) = drawn
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "two and one"
    assert axes.get_xlabel() == "time (ms)"
    assert labels(figure) == ["stage 0   rank 1", "stage 0   rank 2", "stage 1   rank 0"]
    for kind in ("forward", "backward"):
        wanted = [
            round(date * 1e3, 6) for event in events if event.kind == kind for date in (event.start_s, event.end_s)
        ]
        assert sorted(round(date, 6) for span in spans(figure, kind) for date in span[:2]) == sorted(wanted)
    texts = [text.get_text() for text in axes.texts]
    assert sorted(texts, key=int) == [str(batch) for batch in range(10) for _ in range(4)]
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["forward", "backward", "activation", "gradient", "all-reduce"]


def test_messages_lie_on_a_thin_lane_under_their_rank(
    events: tuple[Event, ...], drawn: list[Figure], tmp_path: Path
) -> None:
    draw_timeline(events, tmp_path / "timeline.png", title="lanes")
    activations, gradients = (spans(drawn[0], kind) for kind in ("activation", "gradient"))
    assert len(activations) == len(gradients) == 10
    assert {int(low) for _, _, low, _ in activations} == {0, 1}
    assert {int(low) for _, _, low, _ in gradients} == {2}
    for _, _, low, high in (*activations, *gradients):
        assert 0.3 < low % 1 < high % 1 < 0.5


def test_a_wait_is_no_computing(drawn: list[Figure], tmp_path: Path) -> None:
    measured = [
        Event(0, "forward", 0.0, 10.0, 7, 1),
        Event(0, "receive", 1.0, 4.0, 7, 1, 1, 100),
        Event(0, "receive", 5.0, 6.0, 7, 1, 1, 100),
        Event(0, "backward", 10.0, 12.0, 7, 1),
    ]
    draw_timeline(measured, tmp_path / "waits.png", title="waits")
    assert [span[:2] for span in spans(drawn[0], "forward")] == [(0, 1), (4, 5), (6, 10)]
    assert [span[:2] for span in spans(drawn[0], "wait")] == [(1, 4), (5, 6)]
    assert [(text.get_text(), text.get_position()[0]) for text in drawn[0].axes[0].texts] == [("7", 8), ("7", 11)]
    legend = drawn[0].axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "wait"]


def test_several_runs_stand_below_each_other_on_one_scale(
    events: tuple[Event, ...], drawn: list[Figure], tmp_path: Path
) -> None:
    computed = [event for event in events if event.kind in ("forward", "backward")]
    panels = [Panel("measured", computed), Panel("predicted", [event for event in events if event.rank != 2])]
    draw_panels(panels, tmp_path / "panels.png", title="both")
    upper, lower = drawn[0].axes
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("measured", "predicted")
    assert upper.get_xlim() == lower.get_xlim() == pytest.approx((0, max(event.end_s for event in computed) * 1e3))
    rows = [[label.get_text() for label in axes.get_yticklabels()] for axes in (upper, lower)]
    assert rows[0] == rows[1] == ["stage 0   rank 1", "stage 0   rank 2", "stage 1   rank 0"]
    assert len(upper.texts) == 40
    assert len(lower.texts) == 30
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "time (ms)")
    legend = upper.get_legend()
    assert legend is not None
    assert "all-reduce" in [text.get_text() for text in legend.get_texts()]


def many_events(ranks: int, batches: int, lasts_s: float = 1.0) -> list[Event]:
    """One stage's worth of forwards on each of `ranks`, the last rank being a stage of its own."""
    return [
        Event(rank, "forward", batch * lasts_s, (batch + 1) * lasts_s, batch, int(rank == ranks - 1))
        for rank in range(ranks)
        for batch in range(batches)
    ]


def test_of_many_ranks_some_of_every_stage_are_shown_and_the_title_says_so(drawn: list[Figure], tmp_path: Path) -> None:
    draw_timeline(many_events(50, 3), tmp_path / "many.png", title="fifty")
    assert drawn[0].axes[0].get_title(loc="left") == "fifty  ·  32 of 50 ranks"
    assert labels(drawn[0]) == [*(f"stage 0   rank {rank}" for rank in range(31)), "stage 1   rank 49"]
    draw_timeline(many_events(50, 3), tmp_path / "chosen.png", title="chosen", ranks=[7, 49, 99])
    assert labels(drawn[1]) == ["stage 0   rank 7", "stage 1   rank 49"]
    assert drawn[1].axes[0].get_title(loc="left") == "chosen  ·  2 of 50 ranks"


def test_a_long_run_is_cut_where_numbers_can_still_be_read(drawn: list[Figure], tmp_path: Path) -> None:
    draw_timeline(many_events(2, 500, lasts_s=2e-6), tmp_path / "long.png", title="long")
    axes = drawn[0].axes[0]
    assert axes.get_xlim() == pytest.approx((0, 80))
    assert axes.get_title(loc="left") == "long  ·  0 to 80 µs of 1000"
    assert len(axes.texts) == 2 * 40
    slow = [Event(9, "backward", 100.0 * count, 100.0 * (count + 1), count, 2) for count in range(3)]
    draw_timeline([*many_events(1, 500), *slow], tmp_path / "uneven.png", title="uneven")
    assert drawn[1].axes[0].get_xlim() == pytest.approx((0, 300)), "the slow rank shows some of its work as well"
    draw_timeline(many_events(1, 500), tmp_path / "part.png", title="part", span_s=(100.0, 110.0))
    assert drawn[2].axes[0].get_xlim() == pytest.approx((100, 110))
    assert [text.get_text() for text in drawn[2].axes[0].texts] == [str(batch) for batch in range(100, 110)]


def test_a_run_without_events_is_an_empty_picture(drawn: list[Figure], tmp_path: Path) -> None:
    draw_timeline([], tmp_path / "empty.png", title="nothing")
    assert (tmp_path / "empty.png").read_bytes().startswith(PNG)
    assert drawn[0].axes[0].get_legend() is None


def test_a_sweep_has_a_line_for_each_bandwidth(drawn: list[Figure], tmp_path: Path) -> None:
    points = [
        SweepPoint(
            workers, bandwidth, f"{workers - 1}-1", 1.0, 2.0 + index, 1.0, None if workers == 64 else 1.5 + index
        )
        for index, bandwidth in enumerate((1.25e9, 1.25e10))
        for workers in (64, 4, 16)
    ]
    draw_sweep(points, tmp_path / "sweep.png", title="VGG-16")
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)
    axes = drawn[0].axes[0]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4", "16", "64"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["10 Gbit/s", "100 Gbit/s"]
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines["10 Gbit/s"].get_xdata()) == [4, 16]  # 64 workers were too many to simulate
    assert list(lines["100 Gbit/s"].get_ydata()) == [2.5, 2.5]
    predicted = [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 3]
    assert predicted == [[2.0] * 3, [3.0] * 3]
    assert {text.get_text() for text in axes.texts} == {"3-1", "15-1", "63-1"}


# --- Traces ---------------------------------------------------------------------------------------------------------


def trace_of(events: Any, path: Path) -> list[dict[str, Any]]:
    write_trace(events, path)
    content = json.loads(path.read_text())
    assert content["displayTimeUnit"] == "ms"
    found: list[dict[str, Any]] = content["traceEvents"]
    return found


def test_a_trace_holds_every_event_in_order(events: tuple[Event, ...], tmp_path: Path) -> None:
    entries = trace_of(reversed(events), tmp_path / "trace.json")
    complete = [entry for entry in entries if entry["ph"] == "X"]
    assert len(complete) == len(events)
    assert [entry["ts"] for entry in entries] == sorted(entry["ts"] for entry in entries)
    for kind, name in (("forward", "F4"), ("backward", "B4"), ("update", "U4"), ("all_reduce", "AR4")):
        event = next(event for event in events if event.kind == kind and event.batch == 4 and event.stage == 0)
        entry = next(entry for entry in complete if entry["name"] == name and entry["args"]["stage"] == 0)
        assert (entry["pid"], entry["cat"], entry["args"]["batch"]) == (event.rank, kind, 4)
        assert (entry["ts"], entry["dur"]) == pytest.approx((event.start_s * 1e6, event.duration_s * 1e6))
        assert (entry["tid"] == 0) == (kind != "all_reduce")
    assert next(entry for entry in complete if entry["name"] == "AR4")["args"]["bytes"] == 1000


def test_a_trace_tells_activations_from_gradients(events: tuple[Event, ...], tmp_path: Path) -> None:
    sends = [entry for entry in trace_of(events, tmp_path / "trace.json") if entry.get("cat") == "send"]
    assert {entry["name"] for entry in sends if entry["args"]["batch"] == 3} == {"SA3>0", "SG3>2"}
    forth = next(entry for entry in sends if entry["name"] == "SA3>0")
    assert (forth["pid"], forth["tid"]) == (2, 1)
    assert forth["args"] == {"batch": 3, "stage": 0, "peer": 0, "bytes": 2000}


def test_a_trace_names_ranks_and_threads_in_pipeline_order(events: tuple[Event, ...], tmp_path: Path) -> None:
    names = [entry for entry in trace_of(events, tmp_path / "trace.json") if entry["ph"] == "M"]
    processes = {entry["pid"]: entry["args"]["name"] for entry in names if entry["name"] == "process_name"}
    assert processes == {0: "stage 1 rank 0", 1: "stage 0 rank 1", 2: "stage 0 rank 2"}
    order = {entry["pid"]: entry["args"]["sort_index"] for entry in names if entry["name"] == "process_sort_index"}
    assert order == {1: 0, 2: 1, 0: 2}
    threads = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in names if entry["name"] == "thread_name"}
    assert threads[0, 0] == "compute"
    assert threads[0, 1] == "link"
    assert (0, 2) not in threads


def test_what_overlaps_on_a_link_gets_a_thread_of_its_own(tmp_path: Path) -> None:
    overlapping = [
        Event(0, "send", 0.0, 3.0, 0, 0, 1, 10),
        Event(0, "all_reduce", 1.0, 2.0, 0, 0, None, 10),
        Event(0, "send", 2.5, 4.0, 1, 0, 1, 10),
        Event(0, "send", 4.0, 5.0, 2, 0, 1, 10),
    ]
    entries = trace_of(overlapping, tmp_path / "trace.json")
    threads: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X":
            threads[entry["tid"]].append(entry)
    assert {thread: [entry["name"] for entry in found] for thread, found in threads.items()} == {
        1: ["SA0>1", "SA2>1"],
        2: ["AR0", "SA1>1"],
    }
    for found in threads.values():
        assert all(first["ts"] + first["dur"] <= second["ts"] for first, second in pairwise(found))
    assert {"name": "link 2"} in [entry["args"] for entry in entries if entry["name"] == "thread_name"]
