"""The partition optimizer: PipeDream's hierarchical dynamic program. graph, cluster -> *partition* -> Plan. SOSP'19.

Levels are solved from the innermost out. Each makes a price for every segment of the model on one whole group of the
level, which is to the next level what a layer's compute time is to the first:

    level 0   price of layers a … b on the workers of one host     (a table over all pairs of cuts)
    level 1   stages made of hosts, priced by level 0              (from the first layer only, if outermost)
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph
from pl_pipe.partition.baselines import data_parallel_step_s, uniform_step_s
from pl_pipe.partition.costs import CostModel, PipeDreamCosts
from pl_pipe.partition.costs import cost_model as model_named
from pl_pipe.partition.cuts import MOST_CUTS, Cuts, Floats, cuts_of
from pl_pipe.partition.level import Below, Chosen, LevelProblem, level_problem
from pl_pipe.partition.memory import check_limits, check_memory, nothing_fits, waiting_limit
from pl_pipe.partition.placed import stages_step_s
from pl_pipe.partition.plan import Plan, Stage
from pl_pipe.partition.search import Search, seconds_of_search, seconds_of_table
from pl_pipe.partition.stages import divide
from pl_pipe.partition.table import Table

MOST_CUTS_ABOVE_ONE_LEVEL = 600
"""With several levels the work grows with the cube of the number of cuts."""
MOST_MEMBERS = 16384
"""Of one level: the memory of the search grows with the square."""

_ATTEMPTS = 20
"""Under ever tighter limits, down to an eighth."""

Pick = Callable[[int, int], list[Chosen]]
Solution = tuple[float, list[Chosen], list[Pick]]


def partition(
    graph: LayerGraph,
    *,
    cluster: Cluster,
    cost_model: str = "overlap",
    activation_compression_ratio: float | None = None,
    straight: bool = False,
    memory_bytes: float | None = None,
    optimizer_state_factor: float = 2.0,
    use_fewer: bool = False,
) -> Plan:
    """The plan with the least time between mini-batches.

    Args:
        graph: Layers with their costs.
        cluster: Workers and links.
        cost_model: `overlap` (what the runtime does) or `pipedream` (the original's closed form).
        activation_compression_ratio: Activations are this many times smaller on the wire; under `pipedream`, None
            leaves them out of account.
        straight: One worker a stage.
        memory_bytes: What each worker has.
        optimizer_state_factor: The optimizer's state in multiples of the parameters (2 for Adam, 1 for momentum).
        use_fewer: Workers may be left idle where that is faster.
    """
    model = model_named(cost_model, activation_compression_ratio=activation_compression_ratio)
    check_limits(memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor)
    cuts = considered_cuts(graph, cluster)
    _check_workers(cuts, cluster, straight=straight, use_fewer=use_fewer)

    def solve(limit_bytes: float | None) -> Solution | None:
        depth_SS = None
        if limit_bytes is not None:
            depth_SS = waiting_limit(
                cuts, cost_model=cost_model, memory_bytes=limit_bytes, optimizer_state_factor=optimizer_state_factor
            )
        return _solve(cuts, cluster, model=model, straight=straight, use_fewer=use_fewer, depth_SS=depth_SS)

    def described(solution: Solution) -> Plan:
        plan = replace(_plan(graph, cuts, cluster, model, solution), optimizer_state_factor=optimizer_state_factor)
        if len(cluster.levels) == 1 or straight or plan.predicted_step_s <= plan.data_parallel_step_s:
            return plan
        simple = _data_parallel(graph, cuts, plan)  # prices composed of levels may mislead
        fits = memory_bytes is None or _fits(simple.stages, memory_bytes, optimizer_state_factor)
        return simple if fits else plan

    if memory_bytes is None:
        found = solve(None)
        if found is None:
            raise PlanError(
                f"no pipeline uses exactly {cluster.workers} workers on {len(cuts.layers)} layers; "
                f"set plan.use_fewer=true"
            )
        return described(found)
    for tighter in range(_ATTEMPTS):  # several levels: an inner one cannot know how many workers follow in outer ones
        found = solve(memory_bytes * 0.9**tighter)
        if found is None:
            break
        plan = described(found)
        if cost_model == "pipedream" or _fits(plan.stages, memory_bytes, optimizer_state_factor):
            return plan
    several = len(cluster.levels) > 1
    raise nothing_fits(
        cuts, cluster, memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor,
        least_bytes=None if several else _least_memory(solve, memory_bytes),
    )  # fmt: skip


def considered_cuts(graph: LayerGraph, cluster: Cluster) -> Cuts:
    """The cuts that a plan for this cluster is chosen from."""
    return cuts_of(graph, MOST_CUTS if len(cluster.levels) == 1 else MOST_CUTS_ABOVE_ONE_LEVEL)


def _check_workers(cuts: Cuts, cluster: Cluster, *, straight: bool, use_fewer: bool) -> None:
    if not cuts.layers:
        raise PlanError("the graph has no layer to place, only inputs and unused selections; profile the model anew")
    largest = max(level.members for level in cluster.levels)
    if largest > MOST_MEMBERS:
        raise PlanError(
            f"a level of the cluster has {largest} members, more than the {MOST_MEMBERS} that can be planned for; "
            f"describe it by several levels, such as cluster.levels=[[8,1.25e10],[{largest // 8},1.25e9]]"
        )
    if straight and not use_fewer and cluster.workers > (most := cuts.most_stages()):
        raise PlanError(
            f"plan.straight=true puts one worker on each stage, but there are {cluster.workers} workers and "
            f"{len(cuts.layers)} layers{f' that make at most {most} stages' if most < len(cuts.layers) else ''}; "
            f"set plan.use_fewer=true, or plan for {most} workers"
        )


def _fits(stages: tuple[Stage, ...], memory_bytes: float, optimizer_state_factor: float) -> bool:
    try:
        check_memory(stages, memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor)
    except PlanError:
        return False
    return True


def _solve(
    cuts: Cuts, cluster: Cluster, *, model: CostModel, straight: bool, use_fewer: bool, depth_SS: Floats | None
) -> Solution | None:
    """The best price, the outermost stages, and for each inner level how it divides a segment."""
    below, inner_members = Below.workers(cuts), 1
    inner: list[Pick] = []
    original = isinstance(model, PipeDreamCosts)
    for number, link in enumerate(cluster.levels):
        problem = level_problem(
            cuts,
            model=model,
            link=link,
            inner_members=inner_members,
            below=below,
            depth_SS=depth_SS if original or not number else None,  # above, a segment is spread over a group
            straight=straight,
            use_fewer=use_fewer,
        )
        if number == len(cluster.levels) - 1:
            outermost = _outermost(problem)
            return None if outermost is None else (*outermost, inner)
        table = Table(problem, from_start_only=False, below=None if original else below)
        inner.append(table.stages)
        below, inner_members = table.above(), link.members
    raise AssertionError("a cluster has at least one level")


def _outermost(problem: LevelProblem) -> tuple[float, list[Chosen]] | None:
    last = len(problem.cuts) - 1
    if seconds_of_table(len(problem.cuts), problem.members) > seconds_of_search(len(problem.cuts)):
        return Search(problem).solve()
    table = Table(problem, from_start_only=True)
    price = float(table.prices[0, last])
    return (price, table.stages(0, last)) if np.isfinite(price) else None


def _least_memory(solve: Callable[[float], object], given: float) -> float | None:
    """The least limit with which a plan exists, to one percent; None if there is none at all."""
    high = given
    for _ in range(60):
        high *= 2
        if solve(high) is not None:
            break
    else:
        return None
    low = high / 2
    while high > low * 1.01:
        middle = (low + high) / 2
        low, high = (low, middle) if solve(middle) is not None else (middle, high)
    return high


def _plan(graph: LayerGraph, cuts: Cuts, cluster: Cluster, model: CostModel, solution: Solution) -> Plan:
    """Puts the chosen stages on workers: the last stage first, so that worker 0 sees the loss."""
    step_s, outermost, inner = solution
    placed: dict[tuple[int, int], list[int]] = {}

    def place(level: int, stages: list[Chosen], base: int) -> None:
        member = 0
        size = 1 if level == 0 else cluster.group_size(level - 1)
        for stage in reversed(stages):
            for _ in range(stage.replicas):
                worker = base + member * size
                member += 1
                if level == 0:
                    placed.setdefault((stage.start, stage.end), []).append(worker)
                else:
                    place(level - 1, inner[level - 1](stage.start, stage.end), worker)

    place(len(cluster.levels) - 1, outermost, 0)
    segments = sorted(placed)
    names = [
        [layer.name for layer, here in zip(cuts.layers, cuts.holds_SN[b] & ~cuts.holds_SN[a], strict=True) if here]
        for a, b in segments
    ]
    stages, transfers = divide(graph, names, [placed[segment] for segment in segments])
    if len(cluster.levels) > 1 and not isinstance(model, PipeDreamCosts):
        step_s = stages_step_s(stages, transfers, cluster, model)  # composed level by level it may be too high
    return Plan(
        stages=stages,
        transfers=transfers,
        cluster=cluster,
        cost_model=model.name,
        predicted_step_s=step_s,
        data_parallel_step_s=data_parallel_step_s(graph, cuts, cluster, model),
        uniform_step_s=uniform_step_s(graph, cuts, cluster, model),
        single_device_step_s=float(cuts.compute_s_S[-1]),
        activation_compression_ratio=model.compression,
    )


def _data_parallel(graph: LayerGraph, cuts: Cuts, plan: Plan) -> Plan:
    """All layers on all workers instead."""
    names = [layer.name for layer in cuts.layers]
    stages, transfers = divide(graph, [names], [range(plan.cluster.workers)])
    return replace(plan, stages=stages, transfers=transfers, predicted_step_s=plan.data_parallel_step_s)


def with_stages(graph: LayerGraph, plan: Plan) -> LayerGraph:
    """The graph with each layer's stage, as PipeDream's tools read it."""
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    return replace(graph, nodes=tuple(replace(node, stage=stage_of[node.name]) for node in graph.nodes))
