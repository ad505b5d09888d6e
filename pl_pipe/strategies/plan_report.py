"""A plan as plain text for the log. Plan -> *report* -> logger.

`pl_pipe.report` draws a wider table for a terminal; log files want plain lines.
"""

from collections.abc import Iterable

from pl_pipe.partition import Plan, Stage
from pl_pipe.partition.memory import stage_memory_bytes, waiting_batches
from pl_pipe.units import format_bytes, format_seconds

_HEADINGS = ("stage", "rank", "modules", "compute", "weights", "sends", "memory")
_LEFT = ("modules",)
_NAME_WIDTH = 28


def plan_report(plan: Plan) -> str:
    """One line a stage under a headline; times only where the plan was made from measured ones."""
    timed = plan.single_device_step_s > 0
    headline = f"a pipeline of {len(plan.stages)} stages"
    if timed:
        headline += (
            f", {format_seconds(plan.predicted_step_s)} a mini-batch predicted, one device takes "
            f"{format_seconds(plan.single_device_step_s)}"
        )
    rows = []
    for index, (stage, waiting) in enumerate(zip(plan.stages, waiting_batches(plan.stages), strict=True)):
        memory = stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=plan.optimizer_state_factor)
        sends = sum(transfer.size_bytes for transfer in plan.transfers if transfer.source == index)
        rows.append(
            (
                str(index),
                ", ".join(str(rank) for rank in stage.ranks),
                _span(stage),
                format_seconds(stage.compute_s) if timed else "-",
                format_bytes(stage.parameter_bytes),
                format_bytes(sends),
                format_bytes(memory),
            )
        )
    return "\n".join([headline, *_aligned([_HEADINGS, *rows])])


def _span(stage: Stage) -> str:
    """`features.0 … features.10 (11)`."""
    names = stage.modules or stage.nodes
    first, last = (
        name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}" for name in (names[0], names[-1])
    )
    return f"{first} … {last} ({len(names)})" if len(names) > 1 else first


def _aligned(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    for row in rows:
        cells = (
            cell.ljust(width) if heading in _LEFT else cell.rjust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        )
        yield "  ".join(cells).rstrip()
