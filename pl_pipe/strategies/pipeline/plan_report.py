"""A plan as plain text for the log. Plan -> *report* -> logger.

`pl_pipe.report` draws a wider table for a terminal; log files want plain lines.
"""

from pl_pipe.partition import Plan, Stage
from pl_pipe.partition.memory import stage_memory_bytes, waiting_batches
from pl_pipe.strategies.text_table import aligned
from pl_pipe.units import format_bytes, format_seconds

_HEADINGS = ("stage", "replicas", "ranks", "modules", "compute", "weights", "sends", "memory")
_NAME_WIDTH = 28


def plan_report(plan: Plan, *, rounds: bool = True, simulated_s: float | None = None) -> str:
    """One line a stage under a headline; times only where the plan was made from measured ones.

    The time of a mini-batch is `simulated_s` where that is given: the plan's price counts no waiting between stages.
    `rounds` says that the mini-batches which replicas share out among them are batches of the loader, as they are of
    schedule=pipedream; those of the other schedules are parts of one batch, and share its update anyway.
    """
    timed = plan.single_device_step_s > 0
    headline = _headline(plan)
    if timed:
        step_s = plan.predicted_step_s if simulated_s is None else simulated_s
        headline += (
            f", {format_seconds(step_s)} a mini-batch predicted, one device takes "
            f"{format_seconds(plan.single_device_step_s)}"
        )
    lines = [headline]
    if plan.round > 1 and rounds:
        lines.append(f"{plan.shape}: a round of {plan.round} batches shares an update")
    rows = []
    for index, (stage, waiting) in enumerate(zip(plan.stages, waiting_batches(plan.stages), strict=True)):
        memory = stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=plan.optimizer_state_factor)
        sends = sum(transfer.size_bytes for transfer in plan.transfers if transfer.source == index)
        rows.append(
            (
                str(index),
                str(stage.replicas),
                _span_of_ranks(stage.ranks),
                _span(stage),
                format_seconds(stage.compute_s) if timed else "-",
                format_bytes(stage.parameter_bytes),
                format_bytes(sends),
                format_bytes(memory),
            )
        )
    return "\n".join([*lines, *aligned(_HEADINGS, rows, left=("modules",))])


def _headline(plan: Plan) -> str:
    if len(plan.stages) == 1:
        where = "one rank" if plan.ranks == 1 else f"each of {plan.ranks} ranks"
        return f"{'' if plan.ranks == 1 else 'data parallel: '}the whole model on {where}"
    return f"a pipeline of {len(plan.stages)} stages" + (f" with replicas, {plan.shape}" if plan.round > 1 else "")


def _span_of_ranks(ranks: tuple[int, ...]) -> str:
    """`1-15` where they follow each other."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(str(rank) for rank in ranks)


def _span(stage: Stage) -> str:
    """`features.0 … features.10 (11)`."""
    names = stage.modules or stage.nodes
    first, last = (
        name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}" for name in (names[0], names[-1])
    )
    return f"{first} … {last} ({len(names)})" if len(names) > 1 else first
