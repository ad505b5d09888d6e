"""A measured run beside its prediction: picture, trace, and both paces in a line. MeasuredRun -> *comparison*."""

from pathlib import Path

from pl_pipe.report.measured_run import MeasuredRun, write_run
from pl_pipe.report.overlap import overlap
from pl_pipe.report.timeline import Panel, draw_panels
from pl_pipe.report.trace import write_trace
from pl_pipe.units import format_seconds

NO_TIMES = "the plan has no times to predict from (split_points without a profile)"


def write_comparison(run: MeasuredRun, folder: Path) -> None:
    """Writes `timeline.json`, `timeline.png` and `trace.json`; the first is enough to make the others again."""
    write_run(run, folder / "timeline.json")
    draw_comparison(run, folder / "timeline.png")
    write_trace(run.events, folder / "trace.json", predicted=run.predicted)


def draw_comparison(run: MeasuredRun, path: Path) -> None:
    """Writes a PNG: what was measured above what was predicted, if anything was, on one scale of time."""
    panels = [Panel("measured", run.events)]
    if run.predicted:
        panels.append(Panel("predicted", run.predicted))
    title = run.schedule if run.plan is None else f"{run.schedule}, {len(run.plan.stages)} stages"
    found = run.pace
    if found is not None:
        title += f"  ·  {format_seconds(found.measured_s)} a mini-batch"
        if found.predicted_s is not None:
            title += f", predicted {format_seconds(found.predicted_s)}"
    draw_panels(panels, path, title=title)


def summary(run: MeasuredRun) -> str:
    """`124 ms a mini-batch measured, 120 ms predicted (1.03 times that), over mini-batches 12 to 22`."""
    found = run.pace
    if found is None:
        return f"mini-batches {run.first} to {run.end - 1} were recorded, too few to have a steady pace"
    line = f"{format_seconds(found.measured_s)} a mini-batch measured"
    if found.predicted_s:
        ratio = found.measured_s / found.predicted_s
        line += f", {format_seconds(found.predicted_s)} predicted ({ratio:.2f} times that)"
    line += f", over mini-batches {found.first + 1} to {found.last}"
    messages = overlap(run)
    if messages is not None and messages.under_way_s:
        line += f"; ranks computed during {messages.share:.0%} of the time in which they had messages under way"
    return line if found.predicted_s or run.plan is None else f"{line}; {NO_TIMES}"
