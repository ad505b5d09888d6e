"""How a pipeline strategy comes by its plan, on one rank for all. model, batch -> *Plan* -> stages.

plan=auto                       measured (or found in the cache), then divided by the optimizer, with replicas; or data
                                parallel, or one device a stage, where the simulator finds that quicker
plan=straight                   the same with one device a stage
plan=best                       the same, if a pipeline is worth it (`strategy=auto`)
split_points=[features.10]      recorded, then divided where the user says; replicas=[3,1] spreads the stages
a model with `pl_pipe_layer_costs`      nothing is measured: any of these with the costs that it tells
plan=plan.json                  read, and refused if it is another model's
validate, test, predict         recorded, then divided by a guess at the costs
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from torch import nn
from torchmetrics import Metric

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph, LayerNode, Profile
from pl_pipe.log import get_logger
from pl_pipe.partition import Plan, partition, split_by_hand, split_evenly
from pl_pipe.partition.known_costs import known_costs
from pl_pipe.partition.optimizer import considered_cuts
from pl_pipe.profiling import profile, record_step
from pl_pipe.profiling.place import place_of
from pl_pipe.profiling.profile_cache import ProfileCache, default_folder, profile_key
from pl_pipe.profiling.steps import Step
from pl_pipe.strategies.pipeline.plan_comparison import compare, quickest
from pl_pipe.strategies.pipeline.plan_file import plan_from_file
from pl_pipe.strategies.pipeline.plan_options import AUTO, BEST, MADE, STRAIGHT, check_devices, check_plan_options
from pl_pipe.strategies.pipeline.run_cluster import assumed_cluster, shortened
from pl_pipe.tensors.interception import leaf_modules
from pl_pipe.units import format_bytes, format_seconds

REPEATS, WARMUP, BUDGET_S = 5, 1, 10.0
"""Of the measurement behind `plan=auto`: everyone waits for it, and a stage's share needs no third digit."""
_UNEVEN = 1.5  # times a device's even share of the work
GUESSED_BYTES_PER_S = 1e9
"""Without times a layer is taken to need one second for so many bytes of parameters and outputs. A link is quicker, so
that the guess balances the stages first and looks at the transfers then."""

_log = get_logger(__name__)


def choose_plan(
    model: nn.Module,
    batch: Any,
    *,
    devices: int,
    plan: str = AUTO,
    split_points: Sequence[str] | None = None,
    replicas: Sequence[int] | None = None,
    cluster: Cluster | None = None,
    schedule: str = "pipedream",
    memory_bytes: float | None = None,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
    cache_folder: Path | None = None,
    ignore: tuple[type[nn.Module], ...] = (),
    reads_bind: bool = True,
) -> Plan:
    """The plan for training; one rank calls it and tells the others.

    Args:
        model: a LightningModule, or a module called with the batch; left exactly as it was.
        batch: as the data loader gives it.
        devices: how many there are, one a rank.
        plan: `auto`, `straight`, `best`, or the path of a plan.json.
        split_points: modules after which a stage ends, instead of a plan.
        replicas: how many devices each of those stages has; by default one.
        cluster: the links between the devices; by default those of one machine.
        schedule: what `auto` and `best` compare the ways to train with.
        memory_bytes: what a device has; a plan that needs more is made only where there is no other.
        device: where to measure.
        autocast_dtype: the run's, if it trains under autocast.
        cache_folder: where profiles are kept; by default `$PL_PIPE_CACHE` or `~/.cache/pl_pipe/profiles`.
        ignore: modules of these classes belong to no stage (metrics): what they do counts as operations.
        reads_bind: ranks of earlier stages leave a step that reads a value, so nothing of theirs may come after it.
    """
    check_plan_options(plan=plan, split_points=split_points, replicas=replicas)
    if plan not in MADE:
        return plan_from_file(Path(plan).expanduser(), model, batch, devices=devices, device=device)
    check_devices(split_points=split_points, replicas=replicas, devices=devices)
    by_hand = split_points is not None or replicas is not None
    place = place_of(model, device)
    costs = known_costs(model, batch)
    if costs is not None:
        graph, has_times = costs.graph, True
    else:
        cache = ProfileCache(cache_folder if cache_folder is not None else default_folder())
        measure = not by_hand and devices > 1
        graph, has_times = _graph(model, batch, place, autocast_dtype, cache, measure=measure)
        graph = as_operations(graph if reads_bind else replace(graph, reads=()), model, ignore)
    cluster = cluster or assumed_cluster(devices, backend="nccl" if place.type == "cuda" else "gloo")
    if by_hand:
        chosen = split_by_hand(
            graph, cluster=cluster, split_after=split_points or (), setting="split_points", replicas=replicas
        )
    elif plan == STRAIGHT:
        chosen = _if_it_fits(lambda limit: _straight(graph, cluster, memory_bytes=limit), memory_bytes)
        _warn_of_idle(chosen, model, devices, graph)
    elif plan == BEST:
        comparison = compare(
            graph,
            cluster=cluster,
            schedule=schedule,
            straight=lambda: _straight(graph, cluster, memory_bytes=memory_bytes),
            memory_bytes=memory_bytes,
        )
        rank_zero_info(comparison.report)
        chosen = comparison.plan
    else:
        chosen = _if_it_fits(lambda limit: partition(graph, cluster=cluster, memory_bytes=limit), memory_bytes)
        chosen = quickest(
            chosen,
            (
                lambda: split_by_hand(
                    graph, cluster=cluster, split_after=[], replicas=[cluster.workers], memory_bytes=memory_bytes
                ),
                lambda: _straight(graph, cluster, memory_bytes=memory_bytes),
                lambda: split_evenly(graph, cluster=cluster, memory_bytes=memory_bytes),
            ),
            schedule=schedule,
        )
    if costs is not None:
        return costs.placed(chosen)
    return chosen if has_times else _without_times(chosen)


def evaluation_plan(
    model: nn.Module,
    batch: Any,
    step: Step,
    *,
    devices: int,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
    ignore: tuple[type[nn.Module], ...] = (),
) -> Plan:
    """A plan for `trainer.validate`, `test` or `predict` without a fit: `step(model, batch)` is what they run.

    Nothing is timed: parameters and outputs stand for the work, which is good enough for a pass or two. The plan says
    nothing about times.
    """
    recording = record_step(model, batch, step=step, device=device, autocast_dtype=autocast_dtype, training=False)
    graph = as_operations(recording.graph, model, ignore)
    guessed = (
        replace(node, forward_s=(node.parameter_bytes + node.total_output_bytes) / GUESSED_BYTES_PER_S)
        for node in graph.nodes
    )
    cluster = assumed_cluster(devices)
    chosen = _straight(replace(graph, nodes=tuple(guessed)), cluster)
    _warn_of_idle(chosen, model, devices, graph)
    return _without_times(chosen)


def lockstep_plan(
    model: nn.Module, *, devices: int, split_points: Sequence[str] | None, plan: str, replicas: object, why: str
) -> Plan:
    """For steps in which data flow in any direction: the layers in the order of the model, by their parameters' bytes.

    Nothing is run, for such a step runs optimizers as well.
    """
    if plan not in MADE or replicas is not None:
        option = f"plan={plan}" if plan not in MADE else f"replicas={replicas}"
        raise PlanError(f"{why}, so its layers are divided by their order, one device a stage; leave {option} out")
    leaves = [(name, part) for part, name in leaf_modules(model).items() if not isinstance(part, Metric)]
    nodes = [LayerNode("node0", "Input", 0.0, 0.0, (0,), 0)]
    for number, (name, part) in enumerate(leaves, start=1):
        size = sum(parameter.nbytes for parameter in part.parameters())
        nodes.append(LayerNode(f"node{number}", type(part).__name__, size / 1e9, 0.0, (1,), size, module=name))
    edges = tuple((nodes[number].name, nodes[number + 1].name) for number in range(len(leaves)))
    graph, cluster = LayerGraph(tuple(nodes), edges), assumed_cluster(devices)
    if split_points is not None:
        chosen = split_by_hand(graph, cluster=cluster, split_after=split_points, setting="split_points", replicas=None)
    else:
        chosen = _straight(graph, cluster)
    if chosen.ranks < devices:  # a rank without a stage would be told nothing of what the others read
        raise PlanError(
            f"{why}, and {type(model).__name__} has layers for {chosen.ranks} devices, the trainer has {devices}; set "
            f"devices={chosen.ranks}"
        )
    return _without_times(chosen)


def plan_digest(plan: Plan) -> str:
    """Equal for plans that run alike: the same layers on the same ranks, whatever their times."""
    content = {
        "stages": [[stage.nodes, stage.modules, stage.ranks] for stage in plan.stages],
        "transfers": [[transfer.source, transfer.target, transfer.size_bytes] for transfer in plan.transfers],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def as_operations(graph: LayerGraph, model: nn.Module, ignore: tuple[type[nn.Module], ...]) -> LayerGraph:
    """The graph in which modules of the ignored classes are operations: they run where their inputs are."""
    ignored = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, ignore)}
    return replace(
        graph, nodes=tuple(replace(node, module="") if node.module in ignored else node for node in graph.nodes)
    )


def _graph(
    model: nn.Module,
    batch: Any,
    place: torch.device,
    autocast_dtype: torch.dtype | None,
    cache: ProfileCache,
    *,
    measure: bool,
) -> tuple[LayerGraph, bool]:
    """The model's layers, and whether their times are known: from the cache, or because `measure` was wanted."""
    key = profile_key(model, batch, device=place, autocast_dtype=autocast_dtype)
    found = cache.find(key)
    if found is not None:
        _log.info("the profile of %s was found: %s", found.model, cache.path(key))
    elif measure:
        found = _measured(model, batch, place, autocast_dtype)
        cache.store(key, found)
    if found is None:
        return record_step(model, batch, device=place, autocast_dtype=autocast_dtype).graph, False
    return found.graph, True


def _measured(model: nn.Module, batch: Any, device: torch.device, autocast_dtype: torch.dtype | None) -> Profile:
    found = profile(
        model, batch, device=device, autocast_dtype=autocast_dtype, repeats=REPEATS, warmup=WARMUP, budget_s=BUDGET_S
    )
    _log.info(
        "the profile of %s was measured on %s: %s a step", found.model, found.device, format_seconds(found.step_s)
    )
    return found


def _straight(graph: LayerGraph, cluster: Cluster, *, memory_bytes: float | None = None) -> Plan:
    """A stage a device, or as many as the model's layers allow."""
    most = considered_cuts(graph, cluster).most_stages()
    fewer = cluster.workers > most
    if fewer and len(cluster.levels) == 1:
        cluster, fewer = shortened(cluster, most), False
    return partition(graph, cluster=cluster, straight=True, memory_bytes=memory_bytes, use_fewer=fewer)


def _warn_of_idle(plan: Plan, model: nn.Module, devices: int, graph: LayerGraph) -> None:
    read = _binding_read(graph)
    work_s = [stage.compute_s for stage in plan.stages]
    if read is not None and (plan.ranks < devices or max(work_s) > _UNEVEN * sum(work_s) / devices):
        _log.warning(
            "%s, so the layers in between stay together: of the %d devices one has %.0f %% of the work of %s; move the "
            "read behind the last use, or set schedule=1f1b and num_microbatches=1, with which a read binds nothing",
            read, devices, 100 * max(work_s) / max(sum(work_s), 1e-12), type(model).__name__,
        )  # fmt: skip
    elif plan.ranks < devices:
        _log.warning(
            "%d devices, but %s can be divided into %d at most, since every stage needs a module of its own; the other "
            "devices stay idle: set devices=%d",
            devices, type(model).__name__, plan.ranks, plan.ranks,
        )  # fmt: skip


def _binding_read(graph: LayerGraph) -> str | None:
    """The line that reads a value after which a module runs that ran before it, if there is one."""
    place = {node.name: number for number, node in enumerate(graph.nodes)}
    for read in graph.reads:
        at = place[read.after] + 1
        before = {node.module for node in graph.nodes[:at] if node.module}
        again = next((node.module for node in graph.nodes[at:] if node.module in before), None)
        if again is not None:
            return f"{read.line} reads a value, and {again} is used again after it"
    return None


def _if_it_fits(make: Callable[[float | None], Plan], memory_bytes: float | None) -> Plan:
    """The best plan within the limit; if the estimate finds none, the best without one, and a word about it."""
    try:
        return make(memory_bytes)
    except PlanError as error:
        if memory_bytes is None:
            raise
        _log.warning(
            "by estimate no plan fits the %s of a device, so the run may end for want of memory: %s",
            format_bytes(memory_bytes), error,
        )  # fmt: skip
        return make(None)


def _without_times(plan: Plan) -> Plan:
    """The plan without prices that nothing was measured for."""
    return replace(
        plan,
        stages=tuple(replace(stage, forward_s=0.0, backward_s=0.0) for stage in plan.stages),
        predicted_step_s=0.0,
        data_parallel_step_s=0.0,
        uniform_step_s=None,
        single_device_step_s=0.0,
    )
