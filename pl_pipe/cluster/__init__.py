"""The machines a run stands on: what a launcher has started, their network, and the cost of speaking over it."""

from pl_pipe.cluster.launch import Launch, detect_launch
from pl_pipe.cluster.network import ClusterConfig, network_environment
from pl_pipe.cluster.planned import is_described, planned_cluster
from pl_pipe.cluster.rehearsed import Flow, LabConfig, Link, LinkConfig, RehearsedCluster
from pl_pipe.cluster.topology import Cluster, Level, read_cluster

__all__ = [
    "Cluster",
    "ClusterConfig",
    "Flow",
    "LabConfig",
    "Launch",
    "Level",
    "Link",
    "LinkConfig",
    "RehearsedCluster",
    "detect_launch",
    "is_described",
    "network_environment",
    "planned_cluster",
    "read_cluster",
]
