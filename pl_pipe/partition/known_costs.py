"""Costs that a model brings along, so that nobody measures them. model -> *known costs* -> plan choice.

A model that rehearses a recorded profile knows what its layers take: it has a method `pl_pipe_layer_costs(batch)` that
returns KnownCosts. Its plan is then made from the record itself, as `pl-pipe plan` makes it from the same file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerGraph
from pl_pipe.partition.plan import Plan
from pl_pipe.partition.stages import divide

METHOD = "pl_pipe_layer_costs"


@dataclass(frozen=True)
class KnownCosts:
    """A model's layer graph, and where in the model its layers stand."""

    graph: LayerGraph
    modules: Mapping[str, str]
    """The qualified name of each layer's module; the batch has none."""
    dilation: float = 1.0
    """How many times slower than the record this model's clock is."""

    def placed(self, plan: Plan) -> Plan:
        """A plan for the graph with the names of this model's modules."""
        return replace(plan, stages=tuple(replace(stage, modules=self._modules(stage.nodes)) for stage in plan.stages))

    def fits(self, plan: Plan) -> bool:
        """Whether a plan was made from the same record."""
        planned = {name for stage in plan.stages for name in stage.nodes}
        return planned == set(self.graph.by_name) and all(
            stage.parameter_bytes == sum(self.graph.by_name[name].parameter_bytes for name in stage.nodes)
            for stage in plan.stages
        )

    def adopted(self, plan: Plan) -> Plan:
        """A plan that was made from the record, on this model's clock: the same cuts and ranks, all times dilated."""
        stages, transfers = divide(
            self.graph, [stage.nodes for stage in plan.stages], [stage.ranks for stage in plan.stages]
        )
        before_s = math.fsum(stage.compute_s for stage in plan.stages)
        slower = math.fsum(stage.compute_s for stage in stages) / before_s if before_s else self.dilation
        return self.placed(
            replace(
                plan,
                stages=stages,
                transfers=transfers,
                cluster=_dilated(plan.cluster, self.dilation),
                predicted_step_s=plan.predicted_step_s * slower,
                data_parallel_step_s=plan.data_parallel_step_s * slower,
                uniform_step_s=None if plan.uniform_step_s is None else plan.uniform_step_s * slower,
                single_device_step_s=plan.single_device_step_s * slower,
            )
        )

    def _modules(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.modules[name] for name in nodes if name in self.modules)


def known_costs(model: Any, batch: Any) -> KnownCosts | None:
    """What the model knows of itself; None for an ordinary one, which is to be measured."""
    told = getattr(model, METHOD, None)
    costs = told(batch) if callable(told) else None
    return costs if isinstance(costs, KnownCosts) else None


def _dilated(cluster: Cluster, dilation: float) -> Cluster:
    """The links on a slower clock: 10 Gbit/s are 500 Mbit/s where all else takes 20 times as long."""
    return Cluster(
        tuple(
            replace(level, bandwidth=level.bandwidth / dilation, latency_s=level.latency_s * dilation)
            for level in cluster.levels
        )
    )
