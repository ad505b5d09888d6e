"""Plans for clusters of many sizes and speeds, predicted and simulated. graph -> partition, *simulate* -> report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph
from pl_pipe.partition import Plan
from pl_pipe.schedule import Update, build_programs
from pl_pipe.simulate.baselines import simulate_data_parallel
from pl_pipe.simulate.measures import steady_batches
from pl_pipe.simulate.options import UNDISTURBED, SimulationOptions
from pl_pipe.simulate.simulation import simulate

WORKERS = (4, 16, 64, 256, 1024, 4096)
BANDWIDTHS = (1.25e9, 3.125e9, 1.25e10)
LARGEST = 4_000_000
ACTIONS_A_BATCH = 7  # of a stage: two receives, forward, two sends, backward, update


class Partition(Protocol):
    """What makes the plans; `pl_pipe.partition.partition` does."""

    def __call__(self, graph: LayerGraph, *, cluster: Cluster) -> Plan: ...


@dataclass(frozen=True)
class SweepPoint:
    """One cluster, its plan, and what pipelining gains there."""

    workers: int
    bandwidth: float
    """Bytes a second, each way."""
    shape: str
    """Replicas by stage, `15-1`."""
    predicted_step_s: float
    predicted_speedup: float
    """Over data parallelism, by the optimizer's cost model."""
    simulated_step_s: float | None = None
    """None where the run would be too large to simulate."""
    simulated_speedup: float | None = None
    """Over simulated data parallelism."""


def sweep(
    graph: LayerGraph,
    *,
    partition: Partition,
    workers: Sequence[int] = WORKERS,
    bandwidths: Sequence[float] = BANDWIDTHS,
    update: Update = "minibatch",
    options: SimulationOptions = UNDISTURBED,
    largest_actions: int = LARGEST,
    on_point: Callable[[SweepPoint], None] | None = None,
    on_problem: Callable[[int, float, PlanError], None] | None = None,
) -> list[SweepPoint]:
    """A point for each bandwidth and number of workers, in this order; `on_point` hears of each at once.

    A cluster that no plan can be made for is left out if `on_problem` is there to hear of it. Pipelines update after
    every mini-batch, as the paper's do: rounds of many replicas may be longer than any run.

    A plan with very many stages and workers takes more actions than anyone waits for: over `largest_actions` it is
    only predicted.
    """
    options = replace(options, record_events=False)
    points = []
    for bandwidth in bandwidths:
        for count in workers:
            try:
                plan = partition(graph, cluster=Cluster.flat(count, bandwidth))
            except PlanError as error:
                if on_problem is None:
                    raise
                on_problem(count, bandwidth, error)
                continue
            point = _point(plan, workers=count, bandwidth=bandwidth)
            batches = steady_batches(plan)
            if ACTIONS_A_BATCH * batches * len(plan.stages) <= largest_actions:
                programs = build_programs(plan, schedule="pipedream", batches=batches, update=update)
                step_s = simulate(plan, programs, options=options).step_s
                speedup = simulate_data_parallel(plan, options=options).step_s / step_s
                point = replace(point, simulated_step_s=step_s, simulated_speedup=speedup)
            points.append(point)
            if on_point is not None:
                on_point(point)
    return points


def _point(plan: Plan, *, workers: int, bandwidth: float) -> SweepPoint:
    return SweepPoint(
        workers=workers,
        bandwidth=bandwidth,
        shape=plan.shape,
        predicted_step_s=plan.predicted_step_s,
        predicted_speedup=plan.speedup_over_data_parallel,
    )
