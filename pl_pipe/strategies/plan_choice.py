"""How a pipeline strategy comes by its plan, on one rank for all. model, batch -> *Plan* -> stages.

plan=auto                       measured (or found in the cache), then divided by the optimizer
split_points=[features.10]      recorded, then divided where the user says
plan=plan.json                  read, and refused if it is another model's
validate, test, predict         recorded, then divided by a guess at the costs
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pl_pipe.cluster import Cluster
from pl_pipe.errors import ConfigError
from pl_pipe.graph import LayerGraph, Profile
from pl_pipe.log import get_logger
from pl_pipe.partition import Plan, partition, split_by_hand
from pl_pipe.partition.optimizer import considered_cuts
from pl_pipe.profiling import profile, record_step
from pl_pipe.profiling.place import place_of
from pl_pipe.profiling.profile_cache import ProfileCache, default_folder, profile_key
from pl_pipe.profiling.steps import Step
from pl_pipe.strategies.plan_file import plan_from_file
from pl_pipe.units import format_seconds

AUTO = "auto"
LOCAL_BANDWIDTH = {"cpu": 3e9, "cuda": 1.25e10}
"""Bytes a second between two ranks of one machine: what gloo was measured to give (docs/planning.md), and what PCIe
gives two GPUs at least. For a network, `pl-pipe plan cluster.path=...` makes a plan that the strategy then reads."""
REPEATS, WARMUP, BUDGET_S = 5, 1, 10.0
"""Of the measurement behind `plan=auto`: everyone waits for it, and a stage's share needs no third digit."""
GUESSED_BYTES_PER_S = 1e9
"""Without times a layer is taken to need one second for so many bytes of parameters and outputs. A link is quicker, so
that the guess balances the stages first and looks at the transfers then."""

_log = get_logger(__name__)


def choose_plan(
    model: nn.Module,
    batch: Any,
    *,
    stages: int,
    plan: str = AUTO,
    split_points: Sequence[str] | None = None,
    device: torch.device,
    autocast_dtype: torch.dtype | None = None,
    cache_folder: Path | None = None,
    ignore: tuple[type[nn.Module], ...] = (),
) -> Plan:
    """The plan of a straight pipeline for training; one rank calls it and tells the others.

    Args:
        model: a LightningModule, or a module called with the batch; left exactly as it was.
        batch: as the data loader gives it.
        stages: how many there should be, one a device; with fewer layers there are fewer.
        plan: `auto`, or the path of a plan.json.
        split_points: modules after which a stage ends, instead of a plan.
        device: where to measure.
        autocast_dtype: the run's, if it trains under autocast.
        cache_folder: where profiles are kept; by default `$PL_PIPE_CACHE` or `~/.cache/pl_pipe/profiles`.
        ignore: modules of these classes belong to no stage (metrics): what they do counts as operations.
    """
    if plan != AUTO:
        if split_points is not None:
            raise ConfigError(
                f"plan={plan} and split_points={list(split_points)} each say where to cut; leave one of them out"
            )
        return plan_from_file(Path(plan).expanduser(), model, batch, stages=stages, device=device)
    if split_points is not None and len(split_points) + 1 != stages:
        raise ConfigError(
            f"split_points={list(split_points)} makes {len(split_points) + 1} stages, the trainer has {stages} "
            f"devices; set devices={len(split_points) + 1}, or name {stages - 1} modules"
        )
    place = place_of(model, device)
    cache = ProfileCache(cache_folder if cache_folder is not None else default_folder())
    key = profile_key(model, batch, device=place, autocast_dtype=autocast_dtype)
    found = cache.find(key)
    if found is not None:
        _log.info("the profile of %s was found: %s", found.model, cache.path(key))
    elif split_points is None and stages > 1:
        found = _measured(model, batch, place, autocast_dtype)
        cache.store(key, found)
    if found is None:
        graph = record_step(model, batch, device=place, autocast_dtype=autocast_dtype).graph
    else:
        graph = found.graph
    graph = as_operations(graph, model, ignore)
    if split_points is not None:
        cluster = _cluster(stages, place)
        chosen = split_by_hand(graph, cluster=cluster, split_after=split_points, setting="split_points")
    else:
        chosen = _divided(graph, model, stages=stages, device=place)
    return chosen if found is not None else _without_times(chosen)


def evaluation_plan(
    model: nn.Module,
    batch: Any,
    step: Step,
    *,
    stages: int,
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
    return _without_times(_divided(replace(graph, nodes=tuple(guessed)), model, stages=stages, device=device))


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


def _measured(model: nn.Module, batch: Any, device: torch.device, autocast_dtype: torch.dtype | None) -> Profile:
    found = profile(
        model, batch, device=device, autocast_dtype=autocast_dtype, repeats=REPEATS, warmup=WARMUP, budget_s=BUDGET_S
    )
    _log.info(
        "the profile of %s was measured on %s: %s a step", found.model, found.device, format_seconds(found.step_s)
    )
    return found


def _cluster(stages: int, device: torch.device) -> Cluster:
    return Cluster.flat(stages, LOCAL_BANDWIDTH[device.type])


def _divided(graph: LayerGraph, model: nn.Module, *, stages: int, device: torch.device) -> Plan:
    """A stage a device, or as many as the model's layers allow."""
    most = considered_cuts(graph, _cluster(stages, device)).most_stages()
    if stages > most:
        _log.warning(
            "%d devices, but %s can be divided into %d at most, since every stage needs a module of its own; the other "
            "devices stay idle: set devices=%d",
            stages, type(model).__name__, most, most,
        )  # fmt: skip
    return partition(graph, cluster=_cluster(min(stages, most), device), straight=True)


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
