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
from pl_pipe.partition.costs import CostModel, cost_model
from pl_pipe.partition.cuts import MOST_CUTS, Cuts, Floats, cuts_of
from pl_pipe.partition.level import Chosen, LevelProblem, difference, level_problem
from pl_pipe.partition.memory import check_memory, nothing_fits, waiting_limit
from pl_pipe.partition.plan import Plan
from pl_pipe.partition.search import Search, seconds_of_search, seconds_of_table
from pl_pipe.partition.stages import build_stages, place_side_layers, transfers_between
from pl_pipe.partition.table import Table

MOST_CUTS_ABOVE_ONE_LEVEL = 600
"""With several levels the work grows with the cube of the number of cuts."""

Pick = Callable[[int, int], list[Chosen]]


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
    model = _model(cost_model, activation_compression_ratio)
    _check_memory_setting(memory_bytes)
    cuts = cuts_of(graph, MOST_CUTS if len(cluster.levels) == 1 else MOST_CUTS_ABOVE_ONE_LEVEL)
    if straight and not use_fewer and cluster.workers > len(cuts.layers):
        raise PlanError(
            f"plan.straight=true puts one worker on each stage, but there are {cluster.workers} workers and "
            f"{len(cuts.layers)} layers; set plan.use_fewer=true or cluster.devices={len(cuts.layers)}"
        )

    def solve(limit_bytes: float | None) -> tuple[float, list[Chosen], list[Pick]] | None:
        return _solve(
            cuts, cluster, model=model, straight=straight, use_fewer=use_fewer,
            depth_SS=None if limit_bytes is None else waiting_limit(
                cuts, cost_model=model.name, memory_bytes=limit_bytes, optimizer_state_factor=optimizer_state_factor
            ),
        )  # fmt: skip

    limit = memory_bytes
    while True:
        found = solve(limit)
        if found is None:
            if memory_bytes is None:
                raise PlanError(
                    f"no pipeline uses exactly {cluster.workers} workers on {len(cuts.layers)} layers; "
                    f"set plan.use_fewer=true"
                )
            least = _least_memory(solve, memory_bytes)
            raise nothing_fits(
                cuts, cluster, memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor,
                least_bytes=least,
            )  # fmt: skip
        step_s, outermost, inner = found
        plan = _plan(graph, cuts, cluster, model, step_s, outermost, inner)
        if memory_bytes is None or limit is None or model.name == "pipedream":
            return plan
        try:
            check_memory(plan.stages, memory_bytes=memory_bytes, optimizer_state_factor=optimizer_state_factor)
        except PlanError:  # several levels: an inner one cannot know how many workers follow in the outer ones
            limit *= 0.9
        else:
            return plan


def _model(name: str, ratio: float | None) -> CostModel:
    return cost_model(name, activation_compression_ratio=ratio)


def _check_memory_setting(memory_bytes: float | None) -> None:
    if memory_bytes is not None and not memory_bytes > 0:
        raise PlanError(f"plan.memory_bytes={memory_bytes} is not a positive number of bytes; null sets no limit")


def _solve(
    cuts: Cuts, cluster: Cluster, *, model: CostModel, straight: bool, use_fewer: bool, depth_SS: Floats | None
) -> tuple[float, list[Chosen], list[Pick]] | None:
    """The best price, the outermost stages, and for each inner level how it divides a segment."""
    compute_s_SS, inner_members = difference(cuts.compute_s_S), 1
    inner: list[Pick] = []
    for number, link in enumerate(cluster.levels):
        problem = level_problem(
            cuts,
            model=model,
            link=link,
            inner_members=inner_members,
            compute_s_SS=compute_s_SS,
            depth_SS=depth_SS,
            straight=straight,
            use_fewer=use_fewer,
        )
        if number == len(cluster.levels) - 1:
            outermost = _outermost(problem)
            return None if outermost is None else (*outermost, inner)
        table = Table(problem, from_start_only=False)
        inner.append(table.stages)
        compute_s_SS, inner_members = table.prices, link.members
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


def _plan(
    graph: LayerGraph, cuts: Cuts, cluster: Cluster, model: CostModel, step_s: float, outermost: list[Chosen],
    inner: list[Pick],
) -> Plan:  # fmt: skip
    """Puts the chosen stages on workers: the last stage first, so that worker 0 sees the loss."""
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
    stages = tuple(build_stages(graph, names, [placed[segment] for segment in segments]))
    stage_of = place_side_layers(graph, {name: index for index, group in enumerate(names) for name in group})
    return Plan(
        stages=stages,
        transfers=transfers_between(graph, stage_of),
        cluster=cluster,
        cost_model=model.name,
        predicted_step_s=step_s,
        data_parallel_step_s=data_parallel_step_s(cuts, cluster, model),
        uniform_step_s=uniform_step_s(graph, cuts, cluster, model),
        single_device_step_s=float(cuts.compute_s_S[-1]),
    )


def with_stages(graph: LayerGraph, plan: Plan) -> LayerGraph:
    """The graph with each layer's stage, as PipeDream's tools read it."""
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    return replace(graph, nodes=tuple(replace(node, stage=stage_of[node.name]) for node in graph.nodes))
