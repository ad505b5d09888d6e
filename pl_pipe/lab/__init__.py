"""Clusters rehearsed on one machine: hosts are network namespaces, links are shaped by `tc`."""

from pl_pipe.lab.lab import Lab, remove_abandoned
from pl_pipe.lab.tools import unavailable

__all__ = ["Lab", "remove_abandoned", "unavailable"]
