"""Lightning callbacks, usable without the command line; all but PipelineTimeline with any strategy."""

from pl_pipe.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["PipelineTimeline"]
