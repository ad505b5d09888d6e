"""A plan from a split that the user gives, priced like any other. graph, cluster, names -> *by hand* -> Plan."""

import itertools
from collections.abc import Sequence

import numpy as np

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph
from pl_pipe.partition.baselines import data_parallel_step_s, uniform_step_s
from pl_pipe.partition.costs import cost_model as model_named
from pl_pipe.partition.cuts import cuts_of, reads_that_forbid
from pl_pipe.partition.memory import check_limits, check_memory
from pl_pipe.partition.placed import stages_step_s
from pl_pipe.partition.plan import Plan
from pl_pipe.partition.stages import divide
from pl_pipe.partition.ties import Ties, ties_of


def split_by_hand(
    graph: LayerGraph,
    *,
    cluster: Cluster,
    split_after: Sequence[str],
    setting: str = "plan.split_after",
    replicas: Sequence[int] | None = None,
    cost_model: str = "overlap",
    activation_compression_ratio: float | None = None,
    memory_bytes: float | None = None,
    optimizer_state_factor: float = 2.0,
) -> Plan:
    """The plan whose stages end, in execution order, after the named layers.

    A name is a layer's (`node18`) or a module's (`features.10`; a container's stands for its last layer). Operations
    that follow from what lies before a split belong to it. Without `replicas` every stage has one worker. Workers that
    are left over stay idle. A memory limit counts what a worker really holds, whatever the cost model. Errors call the
    list of names by its `setting`.
    """
    check_limits(memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor)
    model = model_named(cost_model, activation_compression_ratio=activation_compression_ratio)
    cuts = cuts_of(graph)
    layers = [layer.name for layer in cuts.layers]
    ends = [_position(graph, layers, name, setting) for name in split_after]
    if sorted(set(ends)) != ends or (ends and ends[-1] == len(layers) - 1):
        raise PlanError(
            f"{setting}={list(split_after)} must name layers in execution order, each once, and none that ends with "
            f"the model; they run in the order {_shown(graph, layers)}"
        )
    counts = [1] * (len(ends) + 1) if replicas is None else [int(count) for count in replicas]
    if len(counts) != len(ends) + 1 or min(counts) < 1:
        raise PlanError(
            f"{setting} names {len(ends)} layers, which makes {len(ends) + 1} stages, but plan.replicas="
            f"{counts}; give one number of 1 or more for each stage"
        )
    if sum(counts) > cluster.workers:
        raise PlanError(
            f"plan.replicas={counts} needs {sum(counts)} workers, the cluster has {cluster.workers}; "
            f"set cluster.devices={sum(counts)}"
        )
    ties = ties_of(graph)
    befores: list[set[str]] = [ties.closed(layers[: end + 1]) for end in ends]
    groups = [
        [layer for layer in layers if layer in inside and layer not in before]
        for before, inside in itertools.pairwise([set(), *befores, set(layers)])
    ]
    _check_groups(graph, ties, groups, split_after, setting)
    for name, before in zip(split_after, befores, strict=True):
        for read, needed in reads_that_forbid(graph, before):
            raise PlanError(
                f"a cut after {name} cannot work: {read.line} reads a value from behind it, and "
                f"{_module_of(graph, needed)} before it is used after that read; move the read behind the last use, or "
                "set schedule=1f1b and num_microbatches=1, with which a read binds nothing"
            )
    firsts = np.cumsum([0, *reversed(counts)])  # the last stage stands on the first workers
    ranks = [range(int(first), int(first) + count) for first, count in zip(firsts, reversed(counts), strict=False)]
    stages, transfers = divide(graph, groups, ranks[::-1])
    if memory_bytes is not None:
        check_memory(stages, memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor)
    return Plan(
        stages=stages,
        transfers=transfers,
        cluster=cluster,
        cost_model=model.name,
        predicted_step_s=stages_step_s(stages, transfers, cluster, model),
        data_parallel_step_s=data_parallel_step_s(graph, cuts, cluster, model),
        uniform_step_s=uniform_step_s(graph, cuts, cluster, model),
        single_device_step_s=float(cuts.compute_s_S[-1]),
        activation_compression_ratio=model.compression,
        optimizer_state_factor=optimizer_state_factor,
    )


def split_evenly(graph: LayerGraph, *, cluster: Cluster, memory_bytes: float | None = None) -> Plan:
    """As many layers on every worker, in execution order, whatever they cost: what one would do without a planner."""
    layers = [layer.name for layer in cuts_of(graph).layers]
    parts = np.array_split(np.array(layers), min(cluster.workers, len(layers)))
    return split_by_hand(
        graph, cluster=cluster, split_after=[str(part[-1]) for part in parts[:-1]], memory_bytes=memory_bytes
    )


def _check_groups(
    graph: LayerGraph, ties: Ties, groups: Sequence[Sequence[str]], split_after: Sequence[str], setting: str
) -> None:
    """A stage of operations alone would stay empty: they run where their inputs are."""
    for index, group in enumerate(groups):
        if not ties.makes_stage.isdisjoint(group):
            continue
        where = f"before {split_after[0]}" if not index else f"after {split_after[index - 1]}"
        if 0 < index < len(split_after):
            where = f"between {split_after[index - 1]} and {split_after[index]}"
        raise PlanError(
            f"{setting}={list(split_after)} leaves no module for stage {index}: what runs {where} has no module of its "
            f"own, and stands where its inputs are; split between two modules, which run in the order "
            f"{_shown(graph, [])}"
        )


def _shown(graph: LayerGraph, layers: Sequence[str]) -> str:
    """The modules in execution order, or where the graph knows none, the layers: the first few and the last."""
    names = list(dict.fromkeys(node.module for node in graph.in_order() if node.module)) or list(layers)
    return ", ".join(names if len(names) <= 8 else [*names[:6], "…", names[-1]])


def _module_of(graph: LayerGraph, layer: str) -> str:
    """The module whose output the layer is or comes of, or the layer itself."""
    sources = {target: source for source, target in reversed(graph.edges)}
    found = layer
    while not graph.by_name[found].module and found in sources:
        found = sources[found]
    return graph.by_name[found].module or layer


def _position(graph: LayerGraph, layers: list[str], name: str, setting: str) -> int:
    """Where in the execution order the layer, the module or the last layer of the container stands."""
    found = [
        position
        for position, layer in enumerate(layers)
        if layer == name or graph.by_name[layer].module == name or graph.by_name[layer].module.startswith(f"{name}.")
    ]
    if not found:
        raise PlanError(
            f"{setting} names {name}, which is no layer or module that the step runs; name one of those that it has: "
            f"{_shown(graph, layers)}"
        )
    return found[-1]
