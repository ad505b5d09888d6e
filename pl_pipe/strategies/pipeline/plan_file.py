"""A plan that the user gives as a file: read, and refused where this model and these devices cannot run it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from pl_pipe.errors import PlanError
from pl_pipe.partition import Plan, read_plan
from pl_pipe.partition.known_costs import known_costs
from pl_pipe.partition.renumbered import with_rank_0_last
from pl_pipe.profiling import record_step

_SHOWN = 3


def plan_from_file(path: Path, model: nn.Module, batch: Any, *, devices: int, device: torch.device) -> Plan:
    """The plan in the file, if it is for `model` and as many devices; rank 0 then has the last stage."""
    plan = read_plan(path)
    costs = known_costs(model, batch)
    if costs is not None and costs.fits(plan):
        plan = costs.adopted(plan)
    remedy = f"make one with pl-pipe plan profile=<a profile of it> cluster.devices={devices}"
    if plan.ranks != devices:
        raise PlanError(
            f"plan={path} ({plan.shape}) is for {plan.ranks} devices, the trainer has {devices}; set "
            f"devices={plan.ranks}, or {remedy}"
        )
    _check_ranks(plan, path, devices, remedy)
    placed = with_rank_0_last(plan)
    _check_ranks(placed, path, devices, f"rank 0 must have the last stage, which moves the others; {remedy}")
    _check_belongs(plan, path, model, batch, device, remedy)
    return placed


def _check_ranks(plan: Plan, path: Path, devices: int, remedy: str) -> None:
    beyond = [rank for stage in plan.stages for rank in stage.ranks if rank >= devices]
    if beyond:
        raise PlanError(f"plan={path} uses rank {beyond[0]}, the trainer has ranks 0 to {devices - 1}; {remedy}")


def _check_belongs(plan: Plan, path: Path, model: nn.Module, batch: Any, device: torch.device, remedy: str) -> None:
    """Refuses a plan that names modules the model lacks, or lacks modules that the model's step runs."""
    name = type(model).__name__
    for index, stage in enumerate(plan.stages):
        if not stage.modules:
            raise PlanError(f"stage {index} of plan={path} names no module, so nothing of {name} is in it; {remedy}")
    planned = {module for stage in plan.stages for module in stage.modules}
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [module for module in planned if module not in modules]
    if unknown:
        raise PlanError(f"plan={path} is for another model: {name} has no {_listed(unknown)}; {remedy}")
    if not _left_out(modules, planned, model):
        return
    # They may be modules that a step never calls, which no plan names: only the step can tell.
    recording = record_step(model, batch, device=device)
    run = {node.module for node in recording.graph.nodes if node.module and not node.is_parameter}
    missing = [module for module in _left_out(modules, planned, model) if module in run]
    if missing:
        raise PlanError(
            f"plan={path} is for another model: it has no stage for {_listed(missing)} of {name}, which the step runs; "
            f"{remedy}"
        )


def _left_out(modules: dict[str, nn.Module], planned: set[str], model: nn.Module) -> list[str]:
    """Modules with parameters of their own that no stage owns, neither by this nor by another name."""
    owned = {part for name in planned for part in modules[name].modules()}
    return [
        name
        for name, module in modules.items()
        if module is not model and module not in owned and any(True for _ in module.parameters(recurse=False))
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"
