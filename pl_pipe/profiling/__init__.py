"""Measures models and links. model -> *profiling* -> graph, cluster."""

from pl_pipe.profiling.layer_profiler import profile
from pl_pipe.profiling.loading import time_loading

__all__ = ["profile", "time_loading"]
