"""What a plan is compared with, and prices of stages given by hand. cuts, costs -> *baselines* -> Plan."""

from collections.abc import Sequence

import numpy as np

from pl_pipe.cluster import Cluster, Level
from pl_pipe.graph import LayerGraph
from pl_pipe.partition.costs import CostModel, Segment, price
from pl_pipe.partition.cuts import Cuts
from pl_pipe.partition.plan import Stage, Transfer
from pl_pipe.partition.stages import build_stages, place_side_layers, transfers_between


def data_parallel_step_s(cuts: Cuts, cluster: Cluster, model: CostModel) -> float:
    """All layers on all workers, level by level."""
    step_s, inner_members = float(cuts.compute_s_S[-1]), 1
    forward = float(cuts.forward_s_S[-1]) / step_s if step_s else 0.0
    for link in cluster.levels:
        whole = _segment(step_s, forward, float(cuts.parameter_bytes_S[-1]), 0.0, 0.0)
        step_s = float(price(model.first(whole, link, inner_members=inner_members), link.members))
        inner_members = link.members
    return step_s


def uniform_step_s(graph: LayerGraph, cuts: Cuts, cluster: Cluster, model: CostModel) -> float | None:
    """A straight pipeline with equally many layers a stage, in execution order."""
    workers, layers = cluster.workers, [layer.name for layer in cuts.layers]
    if workers > len(layers):
        return None
    groups = [[str(name) for name in part] for part in np.array_split(np.array(layers), workers)]
    stage_of = place_side_layers(graph, {name: index for index, group in enumerate(groups) for name in group})
    ranks = [[worker] for worker in reversed(range(workers))]
    return stages_step_s(build_stages(graph, groups, ranks), transfers_between(graph, stage_of), cluster, model)


def stages_step_s(stages: Sequence[Stage], transfers: Sequence[Transfer], cluster: Cluster, model: CostModel) -> float:
    """The price of stages that stand on given ranks: each is charged for the slowest link it uses."""
    worst = 0.0
    for index, stage in enumerate(stages):
        crossing_in = sum(t.size_bytes for t in transfers if t.source < index <= t.target)
        crossing_out = sum(t.size_bytes for t in transfers if t.source <= index < t.target)
        forward = stage.forward_s / stage.compute_s if stage.compute_s else 0.0
        segment = _segment(stage.compute_s, forward, stage.parameter_bytes, crossing_in, crossing_out)
        link = _slowest_link(index, stages, cluster)
        terms = model.later(segment, link) if index else model.first(segment, link, inner_members=1)
        worst = max(worst, float(price(terms, stage.replicas)))
    return worst


def _slowest_link(index: int, stages: Sequence[Stage], cluster: Cluster) -> Level:
    """The outermost level among the stage's replicas and its neighbours."""
    near = [rank for stage in stages[max(index - 1, 0) : index + 2] for rank in stage.ranks]
    return cluster.link(*near)


def _segment(compute_s: float, forward: float, parameters: float, arriving: float, leaving: float) -> Segment:
    return Segment(*(np.asarray(value, dtype=float) for value in (compute_s, forward, parameters, arriving, leaving)))
