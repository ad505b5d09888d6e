"""Pictures of when each rank computes and sends, and of sweeps over clusters. events, sweep points -> *timeline*."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from pl_pipe.events import Event
from pl_pipe.report.charts import BACKWARD, FORWARD, figure, stage_colour
from pl_pipe.simulate import SweepPoint

MOST_RANKS = 32
MOST_COMPUTES, LEAST_COMPUTES = 40, 8
"""Forwards and backwards in the picture: of the busiest rank, unless another would have too few."""
COLOURS = {
    "forward": FORWARD,
    "backward": BACKWARD,
    "update": "#c8443c",
    "wait": "#dcdcdc",
    "activation": "#a9c3dc",
    "gradient": "#f3cfa6",
    "all-reduce": "#85b6b2",
}
COMPUTES, WAIT = ("forward", "backward"), "wait"
INK, PALE = "#2b2b2b", "#d9d9d9"
WIDTH_IN, MARGINS_IN = 14.0, 1.7
ROW_IN, FRAME_IN, PANEL_IN = 0.42, 1.25, 0.30
LONGEST_SHAPE = 12
FONT_SIZES = (7.0, 5.5)
DIGIT_IN = 0.0088
"""Width of a digit, for each point of its size."""


@dataclass(frozen=True)
class Panel:
    """Events that are drawn under one name."""

    name: str
    events: Sequence[Event]


def draw_timeline(
    events: Iterable[Event],
    path: Path,
    *,
    title: str,
    ranks: Sequence[int] | None = None,
    span_s: tuple[float, float] | None = None,
) -> None:
    """Writes a PNG: a row a rank, in pipeline order, with its link on a thin lane underneath.

    Of many ranks 32 are shown, some of every stage, and of a long run the beginning, as far as batch numbers can be
    read; the title says so. `ranks` and `span_s` choose another part.
    """
    draw_panels([Panel("", list(events))], path, title=title, ranks=ranks, span_s=span_s)


def draw_panels(
    panels: Sequence[Panel],
    path: Path,
    *,
    title: str,
    ranks: Sequence[int] | None = None,
    span_s: tuple[float, float] | None = None,
) -> None:
    """The same for several runs of the same ranks, below each other on one scale; the first says what is shown."""
    by_rank, *others = [_by_rank(panel.events) for panel in panels]
    stage_of = {rank: found[0].stage for rank, found in by_rank.items()}
    in_order = sorted(stage_of, key=lambda rank: (stage_of[rank], rank))
    shown = _choose(in_order, stage_of) if ranks is None else [rank for rank in ranks if rank in stage_of][:MOST_RANKS]
    start_s, end_s = _readable(by_rank, shown) if span_s is None else span_s
    last_s = max((event.end_s for found in by_rank.values() for event in found), default=end_s)

    scale, unit = _unit(end_s - start_s)
    kinds: set[str] = set()
    row_count = len(panels) * max(len(shown), 1)
    with figure(path, width=WIDTH_IN, height=FRAME_IN + PANEL_IN * len(others) + ROW_IN * row_count) as drawn:
        all_axes: list[Axes] = list(drawn.subplots(len(panels), squeeze=False, sharex=True)[:, 0])
        for axes, panel, found in zip(all_axes, panels, [by_rank, *others], strict=True):
            for row, rank in enumerate(shown):
                inside = [event for event in found[rank] if event.end_s > start_s and event.start_s < end_s]
                kinds |= _draw_row(axes, row, inside, stage_of, scale, (end_s - start_s) * scale)
            _dress(axes, shown, stage_of, (start_s * scale, end_s * scale))
            if panel.name:
                axes.set_ylabel(panel.name, fontsize=11, color=INK, labelpad=8)
        all_axes[-1].set_xlabel(f"time ({unit})", fontsize=9, color=INK)
        _legend(all_axes[0], kinds)
        notes = [title]
        if len(shown) < len(in_order):
            notes.append(f"{len(shown)} of {len(in_order)} ranks")
        if end_s < last_s or start_s > 0:
            notes.append(f"{start_s * scale:.4g} to {end_s * scale:.4g} {unit} of {last_s * scale:.4g}")
        all_axes[0].set_title("  ·  ".join(notes), loc="left", fontsize=11, color=INK, pad=10)


def _by_rank(events: Iterable[Event]) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        found[event.rank].append(event)
    return found


def _choose(in_order: Sequence[int], stage_of: dict[int, int]) -> list[int]:
    """As many ranks as can be shown: first replicas of all stages before second ones."""
    replicas: dict[int, int] = defaultdict(int)
    turns = []
    for rank in in_order:
        turns.append((replicas[stage_of[rank]], stage_of[rank], rank))
        replicas[stage_of[rank]] += 1
    chosen = {rank for _, _, rank in sorted(turns)[:MOST_RANKS]}
    return [rank for rank in in_order if rank in chosen]


def _readable(by_rank: dict[int, list[Event]], shown: Sequence[int]) -> tuple[float, float]:
    """From the start to where the busiest rank has done as much as fits with its numbers, and each rank some."""
    least_s, most_s = 0.0, max((event.end_s for rank in shown for event in by_rank[rank]), default=1.0)
    for rank in shown:
        ends = sorted(event.end_s for event in by_rank[rank] if event.kind in COMPUTES)
        if ends:
            least_s = max(least_s, ends[min(LEAST_COMPUTES, len(ends)) - 1])
            most_s = min(most_s, ends[min(MOST_COMPUTES, len(ends)) - 1]) if len(ends) > MOST_COMPUTES else most_s
    return 0.0, max(least_s, most_s) or 1.0


def _unit(length_s: float) -> tuple[float, str]:
    for size_s, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if length_s >= 2 * size_s:
            return 1 / size_s, name
    return 1e9, "ns"


def _draw_row(
    axes: Axes, row: int, events: Sequence[Event], stage_of: dict[int, int], scale: float, length: float
) -> set[str]:
    """The bars of one rank; returns the kinds among them."""
    bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
    waits = [event for event in events if event.kind == "receive"]
    for event in events:
        kind = WAIT if event.kind == "receive" else event.kind.replace("_", "-")
        if event.kind == "send":
            onward = event.peer is None or stage_of.get(event.peer, event.stage + 1) > event.stage
            kind = "activation" if onward else "gradient"
        spans = _without(event, waits) if kind in COMPUTES else [(event.start_s, event.end_s)]
        bars[kind] += [(start_s * scale, (end_s - start_s) * scale) for start_s, end_s in spans]
        if kind in COMPUTES and spans:
            start_s, end_s = max(spans, key=lambda span: span[1] - span[0])
            size = _font_size(event.batch, (end_s - start_s) * scale / length)
            if size is not None:
                middle, label = (start_s + end_s) / 2 * scale, str(event.batch)
                axes.text(middle, row, label, ha="center", va="center", fontsize=size, color="white", clip_on=True)
    for kind, spans in bars.items():
        bottom, height = _lane(kind, row)
        lines = {"edgecolor": "white", "linewidth": 0.6} if kind in COMPUTES else {"linewidth": 0.0}
        axes.broken_barh(spans, (bottom, height), facecolor=COLOURS.get(kind, INK), **lines)
    return {kind for kind, spans in bars.items() if any(length for _, length in spans)}


def _without(event: Event, waits: Sequence[Event]) -> list[tuple[float, float]]:
    """The event's time less what it spent waiting."""
    spans, start_s = [], event.start_s
    for wait in waits:
        if event.start_s <= wait.start_s and wait.end_s <= event.end_s:
            spans.append((start_s, wait.start_s))
            start_s = wait.end_s
    return [(start_s, end_s) for start_s, end_s in [*spans, (start_s, event.end_s)] if end_s > start_s]


def _lane(kind: str, row: int) -> tuple[float, float]:
    """Bottom and height; rows count downward, computing above, the link below."""
    if kind == WAIT:
        return row - 0.10, 0.20
    if kind in COMPUTES or kind == "update":
        return row - 0.30, 0.60
    return row + 0.32, 0.13


def _font_size(batch: int, share: float) -> float | None:
    """The largest size at which a mini-batch's number fits on its share of the width."""
    for size in FONT_SIZES:
        if share * (WIDTH_IN - MARGINS_IN) > (len(str(batch)) + 0.4) * size * DIGIT_IN:
            return size
    return None


def _dress(axes: Axes, shown: Sequence[int], stage_of: dict[int, int], limits: tuple[float, float]) -> None:
    axes.set_xlim(*limits)
    axes.set_ylim(len(shown) - 0.35, -0.55)
    axes.set_yticks(range(len(shown)), [f"stage {stage_of[rank]}   rank {rank}" for rank in shown], fontsize=8)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for row in range(1, len(shown)):
        if stage_of[shown[row]] != stage_of[shown[row - 1]]:
            axes.axhline(row - 0.44, color=PALE, linewidth=0.9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)


def _legend(axes: Axes, kinds: set[str]) -> None:
    handles = [Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items() if kind in kinds]
    if handles:
        axes.legend(
            handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False,
            fontsize=8, handlelength=1.2, handleheight=0.9, columnspacing=1.4, borderaxespad=0.3,
        )  # fmt: skip


def draw_sweep(points: Iterable[SweepPoint], path: Path, *, title: str = "Speed-up over data parallelism") -> None:
    """Writes a PNG: speed-up against workers, a line for each bandwidth; simulated solid, predicted dashed."""
    by_bandwidth: dict[float, list[SweepPoint]] = defaultdict(list)
    for point in points:
        by_bandwidth[point.bandwidth].append(point)
    workers = sorted({point.workers for found in by_bandwidth.values() for point in found})
    with figure(path, width=9.0, height=5.2) as drawn:
        axes = drawn.subplots()
        for index, (bandwidth, found) in enumerate(sorted(by_bandwidth.items())):
            # Lines that lie on each other stay visible: each is thinner than the one below it.
            thickness = 1 - index / (len(by_bandwidth) + 1)
            _draw_bandwidth(axes, bandwidth, found, stage_colour(index), thickness)
        _name_shapes(axes, sorted(by_bandwidth.items()))
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [f"{count:,}" for count in workers])
        axes.minorticks_off()
        axes.axhline(1.0, color=INK, linewidth=0.8, zorder=1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("workers", fontsize=9, color=INK)
        axes.set_ylabel("times faster", fontsize=9, color=INK)
        axes.set_title(f"{title}  ·  simulated ●, predicted - -", loc="left", fontsize=11, color=INK, pad=10)
        axes.grid(color=PALE, linewidth=0.6)
        axes.tick_params(length=0, colors=INK, labelsize=8)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, title="each way, each worker", title_fontsize=8)


def _draw_bandwidth(axes: Axes, bandwidth: float, points: list[SweepPoint], colour: str, thickness: float) -> None:
    points = sorted(points, key=lambda point: point.workers)
    simulated = [(point.workers, point.simulated_speedup) for point in points if point.simulated_speedup is not None]
    axes.plot(
        [point.workers for point in points], [point.predicted_speedup for point in points],
        color=colour, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.8,
    )  # fmt: skip
    axes.plot(
        [count for count, _ in simulated], [speedup for _, speedup in simulated],
        color=colour, linewidth=3 * thickness, marker="o", markersize=8 * thickness,
        label=f"{bandwidth * 8 / 1e9:g} Gbit/s",
    )  # fmt: skip


def _name_shapes(axes: Axes, lines: list[tuple[float, list[SweepPoint]]]) -> None:
    """Writes the plans' shapes above their points, as far as they are short and not on top of each other."""
    room = 0.07 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    taken: dict[int, list[float]] = defaultdict(list)
    for index, (_, points) in enumerate(lines):
        for point in points:
            height = point.simulated_speedup or point.predicted_speedup
            if len(point.shape) > LONGEST_SHAPE or any(abs(height - other) < room for other in taken[point.workers]):
                continue
            taken[point.workers].append(height)
            axes.annotate(
                point.shape, (point.workers, height), (0, 7), textcoords="offset points", ha="center", fontsize=7,
                color=stage_colour(index), path_effects=[withStroke(linewidth=2.5, foreground="white")],
            )  # fmt: skip
