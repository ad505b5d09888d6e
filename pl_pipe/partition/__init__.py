"""Cuts a layer graph into stages for a cluster. graph, cluster -> *partition* -> schedule, simulate."""

from pl_pipe.partition.plan import Plan, Stage, Transfer, read_plan, write_plan

__all__ = ["Plan", "Stage", "Transfer", "read_plan", "write_plan"]
