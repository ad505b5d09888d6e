"""The price of stages that stand on given workers: the busiest resource sets the pace. plan -> *placed* -> baselines.

On one level this is just what the optimizer minimises. With several levels it is exact where the optimizer's price is
composed level by level: every stage's all-reduce runs on the link that joins its own replicas, activations on the link
between neighbouring stages, and workers of a group share the group's link to the outside.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pl_pipe.cluster import Cluster
from pl_pipe.partition.costs import CostModel, PipeDreamCosts
from pl_pipe.partition.plan import Stage, Transfer


@dataclass(frozen=True)
class _Placed:
    stage: Stage
    arriving_bytes: int
    leaving_bytes: int
    own: int
    """Level that joins the stage's replicas."""
    before: int
    """Level that joins them with the stage before."""
    behind: int


def stages_step_s(stages: Sequence[Stage], transfers: Sequence[Transfer], cluster: Cluster, model: CostModel) -> float:
    """Time between mini-batches when the pipeline is full."""
    placed = [_place(index, stages, transfers, cluster) for index in range(len(stages))]
    compression = model.compression
    if isinstance(model, PipeDreamCosts):
        return max(_pipedream_s(entry, cluster, compression, first=not index) for index, entry in enumerate(placed))
    return max(
        max(_computing_s(entry, cluster) for entry in placed), _busiest_port_s(placed, cluster, compression or 1.0)
    )


def _place(index: int, stages: Sequence[Stage], transfers: Sequence[Transfer], cluster: Cluster) -> _Placed:
    stage = stages[index]
    before = stages[index - 1].ranks if index else ()
    behind = stages[index + 1].ranks if index + 1 < len(stages) else ()
    return _Placed(
        stage=stage,
        arriving_bytes=sum(t.size_bytes for t in transfers if t.source < index <= t.target),
        leaving_bytes=sum(t.size_bytes for t in transfers if t.source <= index < t.target),
        own=cluster.meeting_level(stage.ranks),
        before=cluster.meeting_level((*stage.ranks, *before)),
        behind=cluster.meeting_level((*stage.ranks, *behind)),
    )


def _pipedream_s(placed: _Placed, cluster: Cluster, compression: float | None, *, first: bool) -> float:
    stage, replicas = placed.stage, placed.stage.replicas
    reduce_s = 4 * (replicas - 1) / replicas * stage.parameter_bytes / cluster.levels[placed.own].bandwidth
    prices = [(stage.compute_s + reduce_s) / replicas]
    if compression is not None and not first:
        crossings = ((placed.arriving_bytes, placed.before), (placed.leaving_bytes, placed.behind))
        prices += [2 * size / (cluster.levels[at].bandwidth * replicas * compression) for size, at in crossings]
    return max(prices)


def _reduce_s(placed: _Placed, cluster: Cluster) -> float:
    """One all-reduce, which serves as many mini-batches as there are replicas."""
    replicas, link = placed.stage.replicas, cluster.levels[placed.own]
    return link.all_reduce_factor * (replicas - 1) / replicas * placed.stage.parameter_bytes / link.bandwidth


def _computing_s(placed: _Placed, cluster: Cluster) -> float:
    """The stage itself: its computation, or its forward pass and then the all-reduce."""
    stage = placed.stage
    return max(stage.compute_s, stage.forward_s + _reduce_s(placed, cluster)) / stage.replicas


def _busiest_port_s(placed: Sequence[_Placed], cluster: Cluster, compression: float) -> float:
    """The link of the worker, or of the group of workers, that has most to carry for a mini-batch."""
    busy_s: dict[tuple[int, int], float] = defaultdict(float)
    for entry in placed:
        stage = entry.stage
        loads = [
            (entry.before, entry.arriving_bytes / compression / cluster.levels[entry.before].bandwidth),
            (entry.behind, entry.leaving_bytes / compression / cluster.levels[entry.behind].bandwidth),
        ]
        for level, seconds in loads:
            members = _members(stage.ranks, level, cluster)
            for member in members:
                busy_s[level, member] += seconds / len(members)
        for member in _members(stage.ranks, entry.own, cluster):  # a ring passes each of them
            busy_s[entry.own, member] += _reduce_s(entry, cluster) / stage.replicas
    return max(busy_s.values())


def _members(ranks: Sequence[int], level: int, cluster: Cluster) -> set[int]:
    """The members of a level that the ranks are in: workers innermost, groups above."""
    size = cluster.group_size(level - 1) if level else 1
    return {rank // size for rank in ranks}
