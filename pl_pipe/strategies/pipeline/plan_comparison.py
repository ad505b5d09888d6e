"""One device, data parallel or a pipeline: what each would take. graph, cluster -> *comparison* -> plan.

The ways are listed from simple to complicated, and a later one is chosen only where it beats the choice so far:

    one device                      80 ms
    data parallel                   31 ms   quicker by far
    pipeline, one device a stage    30 ms   not by 5 %: not worth it
    pipeline with replicas          24 ms   quicker than data parallel: chosen
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph
from pl_pipe.log import get_logger
from pl_pipe.partition import Plan, partition, split_by_hand
from pl_pipe.partition.memory import check_memory
from pl_pipe.schedule import build_programs
from pl_pipe.simulate import SimulationOptions, simulate, steady_batches
from pl_pipe.strategies.text_table import aligned
from pl_pipe.units import format_bytes, format_seconds

log = get_logger(__name__)

MARGIN = 0.05
"""What a more complicated way, or a plan other than the optimizer's, must save. Predictions are no better than that,
and a pipeline's delay, or the larger batch of replicas, has a price too."""
_REPEATED_UP_TO = 1024
"""Ranks times stages: beyond, one simulation takes a second."""
_TIE = 0.01
"""Simulated times that differ by less are the same. Replicas then add what no simulation counts: a larger batch."""
ONE_DEVICE, DATA_PARALLEL = "one device", "data parallel"
STRAIGHT_PIPELINE, REPLICATED_PIPELINE = "pipeline, one device a stage", "pipeline with replicas"

_SIMULATED_UP_TO = 4096
"""Ranks times stages, and mini-batches of a round: beyond, the plan's own price stands for the simulation."""
_LINK_JITTER, _SEEDS = 0.05, 3
"""Messages over rehearsed links vary about as much. Without that, pipelines whose links are the bottleneck may be
simulated in a lockstep that noise would end: one of them a third slower than it is."""


@dataclass(frozen=True)
class Way:
    """One way to train, and what it takes."""

    name: str
    plan: Plan | None
    """None where there is none that fits."""
    step_s: float
    """Between mini-batches when all is running, simulated with the run's schedule."""
    batches_an_update: int
    why_not: str = ""


@dataclass(frozen=True)
class Comparison:
    """All ways, and the one that was chosen."""

    ways: tuple[Way, ...]
    chosen: Way

    @property
    def plan(self) -> Plan:
        assert self.chosen.plan is not None
        return self.chosen.plan

    @property
    def report(self) -> str:
        """The reason, and a line for each way."""
        headings = ("way", "plan", "a mini-batch", "batches an update", "")
        rows = [
            (
                way.name,
                "-" if way.plan is None else way.plan.shape,
                "-" if way.plan is None else format_seconds(way.step_s),
                "-" if way.plan is None else str(way.batches_an_update),
                "chosen" if way is self.chosen else way.why_not,
            )
            for way in self.ways
        ]
        return "\n".join([f"strategy=auto chose {self._reason()}", *aligned(headings, rows, left=("way", ""))])

    def _reason(self) -> str:
        chosen = self.chosen
        possible = [way for way in self.ways if way.plan is not None and way is not chosen]
        if not possible:
            return f"{chosen.name}: nothing else fits"
        rival = min(possible, key=lambda way: way.step_s)
        gain = rival.step_s / chosen.step_s if chosen.step_s else 1.0
        if gain >= 1:
            return f"{chosen.name}: {gain:.2f} times as fast as the next best ({rival.name})"
        return f"{chosen.name}: {rival.name} would be quicker by less than {MARGIN:.0%}, which is not worth it"


def compare(
    graph: LayerGraph,
    *,
    cluster: Cluster,
    schedule: str,
    straight: Callable[[], Plan],
    memory_bytes: float | None = None,
) -> Comparison:
    """Prices all ways to train on the cluster, and chooses. `straight` makes the plan with one device a stage."""
    makers: list[tuple[str, Callable[[], Plan]]] = [
        (ONE_DEVICE, lambda: split_by_hand(graph, cluster=cluster, split_after=[], replicas=[1])),
        (DATA_PARALLEL, lambda: split_by_hand(graph, cluster=cluster, split_after=[], replicas=[cluster.workers])),
        (STRAIGHT_PIPELINE, straight),
        (REPLICATED_PIPELINE, lambda: partition(graph, cluster=cluster, memory_bytes=memory_bytes)),
    ]
    ways: list[Way] = []
    for name, make in makers:
        way = _way(name, make, schedule=schedule, memory_bytes=memory_bytes)
        another = any(
            other.plan is not None and way.plan is not None and _alike(other.plan, way.plan) for other in ways
        )
        if not another:
            ways.append(way)
    return Comparison(tuple(ways), _worth_it(ways))


def _way(name: str, make: Callable[[], Plan], *, schedule: str, memory_bytes: float | None) -> Way:
    try:
        plan = make()
        if memory_bytes is not None:
            check_memory(plan.stages, memory_bytes=memory_bytes, optimizer_state_factor=plan.optimizer_state_factor)
    except PlanError as error:
        if memory_bytes is None:
            raise
        return Way(name, None, float("inf"), 0, f"does not fit {format_bytes(memory_bytes)}: {error}")
    return Way(name, plan, simulated_step_s(plan, schedule), plan.round if schedule == "pipedream" else 1)


def _alike(one: Plan, other: Plan) -> bool:
    return [(stage.modules, stage.ranks) for stage in one.stages] == [
        (stage.modules, stage.ranks) for stage in other.stages
    ]


def simulated_step_s(plan: Plan, schedule: str) -> float:
    """Between mini-batches when all is running: what the links' latency and a flush cost is counted too."""
    if max(plan.ranks * len(plan.stages), plan.round) > _SIMULATED_UP_TO:
        return plan.predicted_step_s
    group = plan.round * len(plan.stages)  # what the strategy divides a batch into, if it is not told otherwise
    programs = build_programs(
        plan,
        schedule=schedule,
        batches=max(steady_batches(plan), 4 * group),
        accumulate=None if schedule == "pipedream" else group,
    )
    size = plan.ranks * len(plan.stages)
    seeds = range(_SEEDS if len(plan.stages) > 1 and size <= _REPEATED_UP_TO else 1)  # one stage sends nothing
    return statistics.median(
        simulate(
            plan, programs, options=SimulationOptions(record_events=False, link_jitter=_LINK_JITTER, seed=seed)
        ).step_s
        for seed in seeds
    )


def quickest(plan: Plan, others: Sequence[Callable[[], Plan]], *, schedule: str) -> Plan:
    """The plan, unless one of the others would be clearly quicker when it runs, or as quick without replicas.

    The optimizer counts what each stage and link has to do, as if nothing ever waited for anything else. Where a few
    mini-batches in flight cannot hide slow links, a plan that promises more may keep less.
    """
    chosen, chosen_s = plan, simulated_step_s(plan, schedule)
    for make in others:
        try:
            other = make()
        except PlanError:  # it does not fit, or there are fewer layers than devices
            continue
        other_s = simulated_step_s(other, schedule)
        is_simpler = other.round == 1 < chosen.round
        if other_s < chosen_s * (1 - MARGIN) or (is_simpler and other_s < chosen_s * (1 + _TIE)):
            log.info(
                "%s is predicted to take %s for a mini-batch, simulated %s; %s is taken: %s",
                *(chosen.shape, format_seconds(chosen.predicted_step_s), format_seconds(chosen_s)),
                *(other.shape, format_seconds(other_s)),
            )
            chosen, chosen_s = other, other_s
    return chosen


def _worth_it(ways: Sequence[Way]) -> Way:
    chosen: Way | None = None
    for way in ways:
        if way.plan is not None and (chosen is None or way.step_s < chosen.step_s * (1 - MARGIN)):
            chosen = way
    if chosen is None:
        raise PlanError(
            f"no way to train fits by estimate; {ways[-1].name} {ways[-1].why_not}; use smaller batches or more "
            f"devices, or try strategy=pipedream strategy.plan=straight, which does not insist"
        )
    return chosen
