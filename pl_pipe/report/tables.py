"""Profiles and plans as tables for a terminal."""

from collections.abc import Mapping

from rich import box
from rich.table import Table

from pl_pipe.graph import LayerGraph, Profile
from pl_pipe.partition import Plan
from pl_pipe.partition.memory import stage_memory_bytes, waiting_batches
from pl_pipe.simulate import Simulation
from pl_pipe.units import format_bytes, format_seconds


def profile_table(profile: Profile) -> Table:
    """One row a layer, and the totals."""
    title = f"{profile.model} on {profile.device} ({profile.dtype}), batch {', '.join(profile.batch)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for heading in ("forward", "backward", "±", "output", "weights", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in profile.graph.nodes:
        spread = profile.spread[node.name]
        ranges = (spread.forward_s[1] - spread.forward_s[0]) + (spread.backward_s[1] - spread.backward_s[0])
        wobble = f"{50 * ranges / node.compute_s:.0f} %" if node.compute_s else ""
        table.add_row(
            _end_of(node.module or node.name, 14),
            node.description.split("(")[0][:8],
            format_seconds(node.forward_s),
            format_seconds(node.backward_s),
            wobble,
            format_bytes(node.total_output_bytes),
            format_bytes(node.parameter_bytes),
            format_bytes(node.kept_bytes),
        )
    table.add_section()
    table.add_row("all layers", "", *_totals(profile.graph))
    return table


def _end_of(name: str, width: int) -> str:
    """`network.features.10` -> `…k.features.10`: the end tells modules apart."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def _totals(graph: LayerGraph) -> list[str]:
    layers = graph.nodes
    return [
        format_seconds(sum(node.forward_s for node in layers)),
        format_seconds(sum(node.backward_s for node in layers)),
        "",
        "",
        format_bytes(graph.parameter_bytes),
        format_bytes(sum(node.kept_bytes for node in layers)),
    ]


def plan_table(plan: Plan) -> Table:
    """One row a stage."""
    title = f"{plan.shape}: {plan.ranks} of {plan.cluster.workers} workers, {plan.cost_model} cost model"
    table = Table(title=title)
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("layers", overflow="fold")
    for heading in ("×", "ranks", "compute", "weights", "sends", "memory"):
        table.add_column(heading, justify="left" if heading == "ranks" else "right", no_wrap=True)
    for index, (stage, waiting) in enumerate(zip(plan.stages, waiting_batches(plan.stages), strict=True)):
        sends = sum(transfer.size_bytes for transfer in plan.transfers if transfer.source == index)
        memory = stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=plan.optimizer_state_factor)
        names = stage.modules or stage.nodes
        table.add_row(
            str(index), _span(names[0], names[-1], len(stage.nodes)), str(stage.replicas), _ranks(stage.ranks),
            format_seconds(stage.compute_s), format_bytes(stage.parameter_bytes), format_bytes(sends),
            format_bytes(memory),
        )  # fmt: skip
    return table


def _span(first: str, last: str, layers: int) -> str:
    """`features.0 … classifier.6 (41)`: what modules have in common is left out, and so is what does not fit."""
    return f"{_end_of(first, 14)} … {_end_of(last, 14)} ({layers})"


def price_table(plan: Plan, simulated: Mapping[str, float]) -> Table:
    """The plan beside its alternatives; `simulated` are further ways to look at it."""
    table = Table()
    for heading in ("per mini-batch", "time", "plan is"):
        table.add_column(heading, justify="left" if heading == "per mini-batch" else "right")
    table.add_row("this plan, predicted", format_seconds(plan.predicted_step_s), "")
    for name, step_s in simulated.items():
        table.add_row(name, format_seconds(step_s), "")
    for name, price in (
        ("data parallel", plan.data_parallel_step_s),
        ("pipeline with equal numbers of layers", plan.uniform_step_s),
        ("one device", plan.single_device_step_s),
    ):
        if price is not None:
            faster = f"{price / plan.predicted_step_s:.2f}× as fast" if plan.predicted_step_s else ""
            table.add_row(name, format_seconds(price), faster)
    return table


def _ranks(ranks: tuple[int, ...]) -> str:
    """`(4, 5, 6, 9)` -> `4-6, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown[:4]) + (", …" if len(shown) > 4 else "")


def simulation_table(result: Simulation, plan: Plan) -> Table:
    """One row a stage."""
    table = Table(title=f"{plan.shape}, {result.schedule}, {result.batches} mini-batches")
    for heading in ("stage", "ranks", "busy", "sends to later stages", "peak memory", "staleness"):
        table.add_column(heading, justify="left" if heading == "ranks" else "right", no_wrap=True)
    for index, stage in enumerate(plan.stages):
        busy = [result.utilisation[rank] for rank in stage.ranks]
        later = {rank for other in plan.stages[index + 1 :] for rank in other.ranks}
        sent = sum(
            size for (source, target), size in result.link_bytes.items() if source in stage.ranks and target in later
        )
        table.add_row(
            str(index), _ranks(stage.ranks), f"{100 * sum(busy) / len(busy):.0f} %", format_bytes(sent),
            format_bytes(max(result.peak_memory_bytes[rank] for rank in stage.ranks)), str(result.max_staleness[index]),
        )  # fmt: skip
    return table


def result_table(result: Simulation, plan: Plan) -> Table:
    """The run as a whole."""
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, value in (
        ("time per mini-batch", format_seconds(result.step_s)),
        ("predicted by the plan", format_seconds(plan.predicted_step_s)),
        ("bubbles", f"{100 * result.bubble_fraction:.0f} %"),
        ("whole run", format_seconds(result.makespan_s)),
    ):
        table.add_row(name, value)
    return table
