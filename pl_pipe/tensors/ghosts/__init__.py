"""Ghost tensors: every rank runs the whole step, computes its own part, and knows the shapes of the rest."""

from pl_pipe.tensors.ghosts.active import in_step, outside_steps
from pl_pipe.tensors.ghosts.books import BatchNeededError, Exchange, LeaveStep
from pl_pipe.tensors.ghosts.inference import Inference
from pl_pipe.tensors.ghosts.modules import ModulePlace
from pl_pipe.tensors.ghosts.routing import route, unroute
from pl_pipe.tensors.ghosts.specs import TensorSpec
from pl_pipe.tensors.ghosts.step import GhostStep
from pl_pipe.tensors.ghosts.values import home_of, plain, received, settle, state_home, twin, unsettle, value_of

__all__ = [
    "BatchNeededError",
    "Exchange",
    "GhostStep",
    "Inference",
    "LeaveStep",
    "ModulePlace",
    "TensorSpec",
    "home_of",
    "in_step",
    "outside_steps",
    "plain",
    "received",
    "route",
    "settle",
    "state_home",
    "twin",
    "unroute",
    "unsettle",
    "value_of",
]
