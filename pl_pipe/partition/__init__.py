"""Cuts a layer graph into stages for a cluster. graph, cluster -> *partition* -> schedule, simulate."""

from pl_pipe.partition.by_hand import split_by_hand, split_evenly
from pl_pipe.partition.optimizer import partition, with_stages
from pl_pipe.partition.plan import Plan, Stage, Transfer, read_plan, write_plan

__all__ = [
    "Plan",
    "Stage",
    "Transfer",
    "partition",
    "read_plan",
    "split_by_hand",
    "split_evenly",
    "with_stages",
    "write_plan",
]
