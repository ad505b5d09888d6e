"""The machines a run stands on: what a launcher has started, and which network they speak over."""

from pl_pipe.cluster.launch import Launch, detect_launch
from pl_pipe.cluster.network import ClusterConfig, network_environment

__all__ = ["ClusterConfig", "Launch", "detect_launch", "network_environment"]
