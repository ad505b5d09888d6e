"""The commands that decide and predict: plan, simulate, sweep. None of them needs torch."""

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import Progress

from pl_pipe.cli.messages import say
from pl_pipe.cluster import Cluster, is_described, planned_cluster
from pl_pipe.errors import ConfigError
from pl_pipe.graph import LayerGraph, format_graph, read_graph
from pl_pipe.partition import Plan, partition, read_plan, split_by_hand, with_stages, write_plan
from pl_pipe.partition.cuts import cuts_of
from pl_pipe.planning_config import PlanConfig, PlanRoot, SimulateConfig, SimulateRoot, SweepRoot
from pl_pipe.report.plan_picture import draw_plan
from pl_pipe.report.tables import plan_table, price_table, simulation_table
from pl_pipe.report.timeline import draw_sweep, draw_timeline
from pl_pipe.report.trace import write_trace
from pl_pipe.schedule import build_programs, format_programs, render, validate
from pl_pipe.simulate import SimulationOptions, SweepPoint, simulate, steady_batches, sweep

_GRID_RANKS = 16

Root = TypeVar("Root")


def plan(cfg: DictConfig) -> None:
    """Makes a plan; leaves `plan.json`, the graph with stages, and a picture."""
    settings = _typed(cfg, PlanRoot)
    graph, source = _graph(settings.profile)
    out = Path(settings.plan.out) if settings.plan.out else source.parent / "plan.json"
    if out.suffix != ".json":
        raise ConfigError(f"plan.out={out} does not end in .json; the graph and the picture are named after it")
    found = _make_plan(graph, planned_cluster(settings.cluster), settings.plan)
    out.parent.mkdir(parents=True, exist_ok=True)
    graph_file, picture = out.with_suffix(".graph.txt"), out.with_suffix(".png")
    graph_file.write_text(format_graph(with_stages(graph, found)) + "\n")
    draw_plan(found, graph, picture)
    write_plan(found, out)
    Console().print(plan_table(found, optimizer_state_factor=settings.plan.optimizer_state_factor), price_table(found))
    for remark in _remarks(graph, settings, found):
        say(remark)
    say(f"plan: {out}\ngraph: {graph_file}\npicture: {picture}\nNext: pl-pipe simulate plan.path={out}")


def simulate_plan(cfg: DictConfig) -> None:
    """Runs a plan's schedule on its costs; leaves numbers, programs, a timeline and a trace."""
    settings = _typed(cfg, SimulateRoot)
    if settings.plan.path is None:
        raise ConfigError("plan.path is not set; give the plan to simulate: pl-pipe simulate plan.path=plan.json")
    found = read_plan(Path(settings.plan.path))
    if settings.profile is not None:
        found.check_fits(_graph(settings.profile)[0], source=settings.plan.path)
    if is_described(settings.cluster):
        found = _on_cluster(found, planned_cluster(settings.cluster))
    batches = settings.batches if settings.batches is not None else steady_batches(found, settings.deeper)
    programs = build_programs(
        found,
        schedule=settings.schedule,
        batches=batches,
        accumulate=settings.accumulate,
        update=settings.update,  # type: ignore[arg-type]  # checked where it is used
        deeper=settings.deeper,
    )
    validate(programs)
    result = simulate(found, programs, options=_options(settings.simulate))
    folder = Path(settings.simulate.out) if settings.simulate.out else Path(settings.plan.path).parent
    folder.mkdir(parents=True, exist_ok=True)
    numbers, schedule = folder / "simulation.json", folder / "schedule.txt"
    picture, trace = folder / "timeline.png", folder / "trace.json"
    schedule.write_text(format_programs(programs.by_rank) + "\n")
    title = f"{found.shape}, {settings.schedule}, {batches} mini-batches"
    draw_timeline(result.events, picture, title=title)
    write_trace(result.events, trace)
    numbers.write_text(json.dumps(_numbers(result, found), indent=1) + "\n")
    if found.ranks <= _GRID_RANKS:
        say(render(programs, columns=max((Console().width - 20) // 4, 12)))
    Console().print(simulation_table(result, found))
    say(f"numbers: {numbers}\nprograms: {schedule}\ntimeline: {picture}\ntrace (ui.perfetto.dev): {trace}")


def sweep_clusters(cfg: DictConfig) -> None:
    """Plans for many clusters; leaves `sweep.csv` and a plot of the speed-up over data parallelism."""
    settings = _typed(cfg, SweepRoot)
    graph, source = _graph(settings.profile)
    if not settings.sweep.workers or not settings.sweep.bandwidths:
        raise ConfigError("sweep.workers and sweep.bandwidths must each hold at least one number")
    folder = Path(settings.sweep.out) if settings.sweep.out else source.parent
    folder.mkdir(parents=True, exist_ok=True)
    total = len(settings.sweep.workers) * len(settings.sweep.bandwidths)
    with Progress(transient=True) as progress:
        task = progress.add_task("planning and simulating", total=total)
        points = sweep(
            graph,
            partition=lambda graph, *, cluster: _make_plan(graph, cluster, settings.plan),
            workers=settings.sweep.workers,
            bandwidths=settings.sweep.bandwidths,
            on_point=lambda _: progress.advance(task),
        )
    table, picture = folder / "sweep.csv", folder / "sweep.png"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [item.name for item in fields(SweepPoint)])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    draw_sweep(points, picture)
    for point in points:
        simulated = "" if point.simulated_speedup is None else f", simulated {point.simulated_speedup:.2f}×"
        say(
            f"{point.workers:>5} workers, {point.bandwidth:.3g} bytes/s: {point.shape}, "
            f"{point.predicted_speedup:.2f}× data parallel{simulated}"
        )
    say(f"table: {table}\nplot: {picture}")


def _typed(cfg: DictConfig, root: type[Root]) -> Root:
    settings = OmegaConf.to_object(cfg)
    assert isinstance(settings, root)
    return settings


def _graph(profile: str | None) -> tuple[LayerGraph, Path]:
    if profile is None:
        raise ConfigError(
            "profile is not set; give a profile.json or a graph.txt: profile=outputs/vgg16/<run>/profile.json"
        )
    path = Path(profile).expanduser()
    return read_graph(path), path


def _make_plan(graph: LayerGraph, cluster: Cluster, settings: PlanConfig) -> Plan:
    shared: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("cost_model", "activation_compression_ratio", "memory_bytes", "optimizer_state_factor")
    }
    if settings.split_after is None and settings.replicas is None:
        return partition(graph, cluster=cluster, straight=settings.straight, use_fewer=settings.use_fewer, **shared)
    if settings.straight or settings.use_fewer:
        raise ConfigError(
            "plan.straight and plan.use_fewer are choices of the optimizer; leave them out with a split by hand"
        )
    return split_by_hand(
        graph, cluster=cluster, split_after=settings.split_after or [], replicas=settings.replicas, **shared
    )


def _remarks(graph: LayerGraph, settings: PlanRoot, found: Plan) -> list[str]:
    """What a reader of the plan should know about how it came about."""
    said = []
    if settings.cluster.devices is not None and settings.cluster.bandwidth is None:
        said.append(
            f"assumed cluster.bandwidth={found.cluster.levels[0].bandwidth:.3g} bytes/s; `pl-pipe probe` measures it"
        )
    ordered = cuts_of(graph).ordered
    if ordered:
        said.append(
            f"{ordered} layers stand in branches with too many cuts to try all; there only cuts along the "
            f"execution order were tried"
        )
    said += [f"{read.line} reads a value of {read.layer}; cuts that this forbids were left out" for read in graph.reads]
    return said


def _on_cluster(found: Plan, cluster: Cluster) -> Plan:
    most = max(rank for stage in found.stages for rank in stage.ranks) + 1
    if most > cluster.workers:
        raise ConfigError(
            f"the plan uses {most} workers, the cluster given has {cluster.workers}; set cluster.devices={most}"
        )
    return replace(found, cluster=cluster)


def _options(settings: SimulateConfig) -> SimulationOptions:
    known = {item.name for item in fields(SimulationOptions)}
    given = {name: value for name, value in vars(settings).items() if name in known}
    by_number = {name: _by_number(f"simulate.{name}", given[name]) for name in ("slowdown", "contention")}
    return SimulationOptions(**{**given, **by_number})


def _by_number(name: str, given: Any) -> dict[int, float]:
    """`{3: 2.0}`, whatever Hydra made of the keys."""
    try:
        return {int(key): float(value) for key, value in dict(given or {}).items()}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}={given} is not a map of numbers; write {name}={{3:2.0}}") from error


def _numbers(result: Any, found: Plan) -> dict[str, Any]:
    """A simulation without its events, as JSON can hold it."""
    content = {item.name: getattr(result, item.name) for item in fields(result) if item.name != "events"}
    content["link_bytes"] = {f"{source}>{target}": size for (source, target), size in result.link_bytes.items()}
    content["utilisation"] = {str(rank): share for rank, share in result.utilisation.items()}
    content["peak_memory_bytes"] = {str(rank): size for rank, size in result.peak_memory_bytes.items()}
    return {"schema": 1, "plan": found.shape, "predicted_step_s": found.predicted_step_s, **content}


TOOLS: dict[str, Callable[[DictConfig], None]] = {"plan": plan, "simulate": simulate_plan, "sweep": sweep_clusters}
