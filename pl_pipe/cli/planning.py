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
from pl_pipe.cli.outputs import written_together
from pl_pipe.cluster import Cluster, is_described, planned_cluster
from pl_pipe.errors import ConfigError, PlanError
from pl_pipe.graph import LayerGraph, format_graph, read_graph
from pl_pipe.partition import Plan, partition, read_plan, split_by_hand, with_stages, write_plan
from pl_pipe.partition.costs import cost_model
from pl_pipe.partition.optimizer import considered_cuts
from pl_pipe.partition.placed import stages_step_s
from pl_pipe.planning_config import PlanConfig, PlanRoot, SimulateConfig, SimulateRoot, SweepRoot
from pl_pipe.report.plan_picture import draw_plan
from pl_pipe.report.tables import plan_table, price_table, result_table, simulation_table
from pl_pipe.report.timeline import draw_sweep, draw_timeline
from pl_pipe.report.trace import write_trace
from pl_pipe.schedule import build_programs, format_programs, render, validate
from pl_pipe.simulate import Simulation, SimulationOptions, SweepPoint, simulate, steady_batches, sweep

_GRID_RANKS = 16
_SIMULATED_UP_TO = 4096
"""Ranks times stages: about a second of simulation."""

Root = TypeVar("Root")


def plan(cfg: DictConfig) -> None:
    """Makes a plan; leaves `plan.json`, the graph with stages, and a picture."""
    settings = _typed(cfg, PlanRoot)
    graph, source = _graph(settings.profile)
    out = Path(settings.plan.out).expanduser() if settings.plan.out else source.parent / "plan.json"
    if out.suffix != ".json" or out.resolve() == source.resolve():
        raise ConfigError(
            f"plan.out={out} must end in .json and not be the profile; the other files are named after it"
        )
    found = _make_plan(graph, planned_cluster(settings.cluster), settings.plan)
    targets = {"plan": out, "graph": out.with_suffix(".graph.txt"), "picture": out.with_suffix(".png")}
    with written_together(targets) as places:
        places["graph"].write_text(format_graph(with_stages(graph, found)) + "\n")
        draw_plan(found, graph, places["picture"])
        write_plan(found, places["plan"])
    Console().print(plan_table(found), price_table(found, _simulated(found)))
    for remark in _remarks(graph, settings, found):
        say(remark)
    _say_files(targets)
    say(f"Next: pl-pipe simulate plan.path={out}")


def simulate_plan(cfg: DictConfig) -> None:
    """Runs a plan's schedule on its costs; leaves numbers, programs, a timeline and a trace."""
    settings = _typed(cfg, SimulateRoot)
    if settings.plan.path is None:
        raise ConfigError("plan.path is not set; give the plan to simulate: pl-pipe simulate plan.path=plan.json")
    path = Path(settings.plan.path).expanduser()
    found = read_plan(path)
    if settings.profile is not None:
        found.check_fits(_graph(settings.profile)[0], source=str(path))
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
    result = simulate(found, programs, options=_options(settings.simulate, found))
    folder = Path(settings.simulate.out or path.with_name(f"{path.stem}_{settings.schedule}")).expanduser()
    names = {
        "numbers": "simulation.json",
        "programs": "schedule.txt",
        "timeline": "timeline.png",
        "trace": "trace.json",
    }
    targets = {name: folder / file for name, file in names.items()}
    with written_together(targets) as places:
        places["programs"].write_text(format_programs(programs.by_rank) + "\n")
        draw_timeline(
            result.events, places["timeline"], title=f"{found.shape}, {settings.schedule}, {batches} mini-batches"
        )
        write_trace(result.events, places["trace"])
        places["numbers"].write_text(json.dumps(_numbers(result, found), indent=1) + "\n")
    if found.ranks <= _GRID_RANKS:
        say("With forwards of one and backwards of two units of time, and messages that take none:")
        say(render(programs, columns=max((Console().width - 20) // 4, 12)))
    Console().print(simulation_table(result, found), result_table(result, found))
    _say_files(targets)
    say("ui.perfetto.dev opens the trace")


def sweep_clusters(cfg: DictConfig) -> None:
    """Plans for many clusters; leaves `sweep.csv` and a plot of the speed-up over data parallelism."""
    settings = _typed(cfg, SweepRoot)
    graph, source = _graph(settings.profile)
    if not settings.sweep.workers or not settings.sweep.bandwidths:
        raise ConfigError("sweep.workers and sweep.bandwidths must each hold at least one number")
    folder = Path(settings.sweep.out).expanduser() if settings.sweep.out else source.parent
    problems: list[str] = []
    ratio = settings.plan.activation_compression_ratio
    with Progress(transient=True) as progress:
        task = progress.add_task(
            "planning and simulating", total=len(settings.sweep.workers) * len(settings.sweep.bandwidths)
        )

        def leave_out(workers: int, bandwidth: float, error: PlanError) -> None:
            problems.append(f"{workers} workers at {bandwidth:.3g} bytes/s: {error}")
            progress.advance(task)

        points = sweep(
            graph,
            partition=lambda graph, *, cluster: _make_plan(graph, cluster, settings.plan),
            workers=settings.sweep.workers,
            bandwidths=settings.sweep.bandwidths,
            options=SimulationOptions(activation_compression_ratio=1.0 if ratio is None else ratio),
            on_point=lambda _: progress.advance(task),
            on_problem=leave_out,
        )
    if not points:
        raise ConfigError(f"no plan could be made for any cluster of the sweep; the first: {problems[0]}")
    targets = {"table": folder / "sweep.csv", "plot": folder / "sweep.png"}
    with written_together(targets) as places:
        with places["table"].open("w", newline="") as file:
            writer = csv.DictWriter(file, [item.name for item in fields(SweepPoint)])
            writer.writeheader()
            writer.writerows(asdict(point) for point in points)
        draw_sweep(points, places["plot"])
    for point in points:
        simulated = "" if point.simulated_speedup is None else f", simulated {point.simulated_speedup:.2f}×"
        say(
            f"{point.workers:>5} workers, {point.bandwidth:.3g} bytes/s: {point.shape}, "
            f"{point.predicted_speedup:.2f}× data parallel{simulated}"
        )
    for problem in problems:
        say(f"left out: {problem}")
    if max(point.predicted_speedup for point in points) < 1.005:
        say("Data parallelism is best on all of these: links are fast, or parameters few, next to the computation.")
    _say_files(targets)


def _simulated(found: Plan) -> dict[str, float]:
    """What the simulator says of the plan, as published and with twice as much in flight; nothing of huge plans."""
    if found.ranks * len(found.stages) > _SIMULATED_UP_TO:
        return {}
    options = _options(SimulateConfig(), found, record_events=False)
    steps = {}
    for name, deeper in (("this plan, simulated", 0.0), ("this plan, simulated with deeper=1", 1.0)):
        batches = steady_batches(found, deeper)
        programs = build_programs(found, schedule="pipedream", batches=batches, update="minibatch", deeper=deeper)
        steps[name] = simulate(found, programs, options=options).step_s
        if len(found.stages) == 1:
            break  # nothing to be deeper than
    return steps


def _say_files(targets: dict[str, Path]) -> None:
    for name, path in targets.items():
        say(f"{name}: {path}")


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
    by_hand = settings.plan.split_after is not None or settings.plan.replicas is not None
    ordered = 0 if by_hand else considered_cuts(graph, found.cluster).ordered
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
    model = cost_model(found.cost_model, activation_compression_ratio=found.activation_compression_ratio)
    step_s = stages_step_s(found.stages, found.transfers, cluster, model)
    return replace(found, cluster=cluster, predicted_step_s=step_s)


def _options(settings: SimulateConfig, found: Plan, *, record_events: bool = True) -> SimulationOptions:
    """The settings; what they leave open is as the plan was made."""
    known = {item.name for item in fields(SimulationOptions)}
    given = {name: value for name, value in vars(settings).items() if name in known and value is not None}
    given.setdefault("optimizer_state_factor", found.optimizer_state_factor)
    given.setdefault("activation_compression_ratio", found.activation_compression_ratio or 1.0)
    given["record_events"] = record_events
    by_number = {name: _by_number(f"simulate.{name}", given.get(name)) for name in ("slowdown", "contention")}
    return SimulationOptions(**{**given, **by_number})


def _by_number(name: str, given: Any) -> dict[int, float]:
    """`{3: 2.0}`, whatever Hydra made of the keys."""
    try:
        if not isinstance(given or {}, dict) or any(int(key) != float(key) for key in given or {}):
            raise ValueError(given)
        return {int(key): float(value) for key, value in (given or {}).items()}
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}={given} is not a map of numbers; write {name}={{3:2.0}}") from error


def _numbers(result: Simulation, found: Plan) -> dict[str, Any]:
    """A simulation without its events, as JSON can hold it."""
    content = {item.name: getattr(result, item.name) for item in fields(result) if item.name != "events"}
    content["link_bytes"] = {f"{source}>{target}": size for (source, target), size in result.link_bytes.items()}
    content["utilisation"] = {str(rank): share for rank, share in result.utilisation.items()}
    content["peak_memory_bytes"] = {str(rank): size for rank, size in result.peak_memory_bytes.items()}
    return {"schema": 1, "plan": found.shape, "predicted_step_s": found.predicted_step_s, **content}


TOOLS: dict[str, Callable[[DictConfig], None]] = {"plan": plan, "simulate": simulate_plan, "sweep": sweep_clusters}
