"""A plan with other ranks: 0 has the last stage, and so sees the loss. Plan -> *renumbered* -> pipeline.

    2 hosts of 2, last stage on rank 3, which is worker 1 of host 1: hosts 0 and 1 change places, workers 0 and 1 too

        host 0: 0 1    host 1: 2 3     ──►     host 0: 3 2    host 1: 1 0

Groups change places as wholes, so ranks that shared a host still share one, and every price stays as it was.
"""

from dataclasses import replace

from pl_pipe.cluster import Cluster
from pl_pipe.partition.plan import Plan


def with_rank_0_last(plan: Plan) -> Plan:
    """The plan with rank 0 in its last stage; itself, where that is so already."""
    if 0 in plan.stages[-1].ranks:
        return plan
    first = min(plan.stages[-1].ranks)
    moved = [
        replace(stage, ranks=tuple(sorted(_moved(rank, first, plan.cluster) for rank in stage.ranks)))
        for stage in plan.stages
    ]
    return replace(plan, stages=tuple(moved))


def _moved(rank: int, first: int, cluster: Cluster) -> int:
    """`rank`, where at every level the group of `first` and the group of rank 0 change places."""
    result, size = 0, 1
    for level in cluster.levels:
        digit, wanted = rank // size % level.members, first // size % level.members
        result += size * {wanted: 0, 0: wanted}.get(digit, digit)
        size *= level.members
    return result
