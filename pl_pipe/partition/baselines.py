"""What a plan is compared with: data parallelism, and equal numbers of layers. cuts, costs -> *baselines* -> Plan."""

import numpy as np

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerGraph
from pl_pipe.partition.costs import CostModel, PipeDreamCosts, Segment, price
from pl_pipe.partition.cuts import Cuts
from pl_pipe.partition.placed import stages_step_s
from pl_pipe.partition.stages import divide


def data_parallel_step_s(graph: LayerGraph, cuts: Cuts, cluster: Cluster, model: CostModel) -> float:
    """All layers on all workers; the original has a formula of its own for several levels."""
    if not isinstance(model, PipeDreamCosts):
        stages, transfers = divide(graph, [[layer.name for layer in cuts.layers]], [range(cluster.workers)])
        return stages_step_s(stages, transfers, cluster, model)
    step_s, inner_members, nothing = float(cuts.compute_s_S[-1]), 1, np.zeros(())
    for link in cluster.levels:
        parameters = np.asarray(cuts.parameter_bytes_S[-1])
        whole = Segment(np.asarray(step_s), nothing, parameters, parameters, parameters, nothing, nothing)
        step_s = float(price(model.first(whole, link, inner_members=inner_members), link.members))
        inner_members = link.members
    return step_s


def uniform_step_s(graph: LayerGraph, cuts: Cuts, cluster: Cluster, model: CostModel) -> float | None:
    """A straight pipeline with equally many layers a stage, in execution order; None with too few layers."""
    workers, layers = cluster.workers, [layer.name for layer in cuts.layers]
    if workers > len(layers):
        return None
    groups = [[str(name) for name in part] for part in np.array_split(np.array(layers), workers)]
    stages, transfers = divide(graph, groups, [[worker] for worker in reversed(range(workers))])
    return stages_step_s(stages, transfers, cluster, model)
