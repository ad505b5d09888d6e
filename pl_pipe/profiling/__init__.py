"""Measures models and links. model -> *profiling* -> graph, cluster."""

from pl_pipe.profiling.layer_profiler import profile
from pl_pipe.profiling.loading import time_loading
from pl_pipe.profiling.recorded_step import record_step

__all__ = ["profile", "record_step", "time_loading"]
