"""How much a worker must hold, and what to say when nothing fits. cuts -> *memory* -> optimizer.

A stage that is followed by w workers and has r replicas keeps ceil(w / r) mini-batches waiting for their backward pass
besides the running one. Under `overlap` a worker holds, for each mini-batch in flight, what it received, the
activations its layers save and the weights its forward pass used, and once the gradients and the optimizer's state:

    (waiting + 1) * (received + activations + parameters) + (1 + optimizer_state_factor) * parameters

The original counts waiting mini-batches only, takes all outputs for activations, and leaves out the rest.
"""

import math

import numpy as np

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerNode
from pl_pipe.partition.cuts import Cuts, Floats
from pl_pipe.partition.level import difference
from pl_pipe.partition.plan import Stage
from pl_pipe.units import format_bytes


def waiting_limit(cuts: Cuts, *, cost_model: str, memory_bytes: float, optimizer_state_factor: float) -> Floats:
    """[a, b]: how many mini-batches the segment may keep waiting; below 0 where it does not fit at all."""
    parameters = difference(cuts.parameter_bytes_S)
    if cost_model == "pipedream":
        each, fixed, running = parameters + difference(cuts.output_bytes_S), 0.0 * parameters, 0
    else:
        each = parameters + difference(cuts.kept_bytes_S) + cuts.crossing_bytes_S[:, None]
        fixed, running = (1 + optimizer_state_factor) * parameters, 1
    room = memory_bytes - fixed
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(each > 0, np.floor(room / each), np.where(room >= 0, np.inf, -1.0))
    return np.maximum(most, -1.0) - running


def stage_memory_bytes(stage: Stage, *, waiting: int, optimizer_state_factor: float) -> float:
    """What a worker of the stage holds."""
    each = stage.parameter_bytes + stage.activation_bytes
    return (waiting + 1) * each + (1 + optimizer_state_factor) * stage.parameter_bytes


def waiting_batches(stages: tuple[Stage, ...]) -> list[int]:
    """For each stage the mini-batches that wait for their backward pass beside the running one."""
    behind = [sum(stage.replicas for stage in stages[index + 1 :]) for index in range(len(stages))]
    return [math.ceil(after / stage.replicas) for after, stage in zip(behind, stages, strict=True)]


def check_memory(stages: tuple[Stage, ...], *, memory_bytes: float, optimizer_state_factor: float) -> None:
    """Refuses stages that do not fit, with the numbers; by what a worker really holds."""
    for index, (stage, waiting) in enumerate(zip(stages, waiting_batches(stages), strict=True)):
        needs = stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=optimizer_state_factor)
        if needs > memory_bytes:
            raise PlanError(
                f"stage {index} ({stage.nodes[0]} … {stage.nodes[-1]}, {stage.replicas} replicas, {waiting + 1} "
                f"mini-batches in flight) needs {format_bytes(needs)}, {format_bytes(needs - memory_bytes)} more than "
                f"plan.memory_bytes={memory_bytes:g}; split it, give it more replicas, or use smaller mini-batches"
            )


def check_limits(*, memory_bytes: float | None, optimizer_state_factor: float) -> None:
    """Refuses settings that are no amounts of memory."""
    if memory_bytes is not None and not 0 < memory_bytes < math.inf:
        raise PlanError(f"plan.memory_bytes={memory_bytes} is not a positive number of bytes; null sets no limit")
    if not 0 <= optimizer_state_factor < math.inf:
        raise PlanError(
            f"plan.optimizer_state_factor={optimizer_state_factor} is not 0 or more; 2 is Adam, 1 momentum, 0 plain SGD"
        )


def nothing_fits(
    cuts: Cuts, cluster: Cluster, *, memory_bytes: float, optimizer_state_factor: float, least_bytes: float | None
) -> PlanError:
    """The error for a limit that no plan keeps: names the layer that needs most, and what would be enough."""

    def alone(layer: LayerNode) -> float:
        return (2 + optimizer_state_factor) * layer.parameter_bytes + layer.kept_bytes

    largest = max(cuts.layers, key=alone)
    name = f"{largest.name} ({largest.module or largest.description})"
    text = f"no plan for {cluster.workers} workers was found that fits plan.memory_bytes={memory_bytes:g}: "
    if alone(largest) > memory_bytes:
        missing = format_bytes(alone(largest) - memory_bytes)
        text += f"layer {name} alone needs {format_bytes(alone(largest))}, {missing} more"
    else:
        text += f"every layer fits by itself (the largest, {name}, needs {format_bytes(alone(largest))}), not together"
    if least_bytes is not None:
        text += f"; the least that is enough is plan.memory_bytes={least_bytes:.4g}"
    return PlanError(text + "; raise it, use smaller mini-batches, or add workers")
