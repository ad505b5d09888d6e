"""A model divided among stages by a plan, and the steps that run on it."""

from pl_pipe.stages.ownership import Ownership
from pl_pipe.stages.pipe import Pipe
from pl_pipe.stages.pipe_step import IDLE, PipeStep
from pl_pipe.stages.placement import place, restore

__all__ = ["IDLE", "Ownership", "Pipe", "PipeStep", "place", "restore"]
