"""Lightning callbacks, usable without the command line.

All are for any strategy but PipelineTimeline and those that stop variants.
"""

from pl_pipe.callbacks.pipeline_timeline import PipelineTimeline
from pl_pipe.callbacks.variant_stopping import Hyperband, SuccessiveHalving, VariantEarlyStopping

__all__ = ["Hyperband", "PipelineTimeline", "SuccessiveHalving", "VariantEarlyStopping"]
