"""A step's layers without their times: one forward pass, which is all that a split by hand needs to know."""

from typing import Any

import torch
from torch import nn

from pl_pipe.profiling.place import place_of, ready_to_run, refuse_opaque
from pl_pipe.profiling.steps import Step, default_step
from pl_pipe.tensors import Recorder, Recording


def record_step(
    model: nn.Module,
    batch: Any,
    *,
    step: Step | None = None,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
    training: bool = True,
) -> Recording:
    """The layers of one step, what they depend on, and their sizes; all their times are 0.

    The arguments are those of `profile`. Without `training` the model is in evaluation mode, under no_grad, and `step`
    may return anything.
    """
    place = place_of(model, device)
    with ready_to_run(model, batch, place, training=training) as moved:
        run = step or default_step(model, moved)
        autocast = torch.autocast(place.type, autocast_dtype, enabled=autocast_dtype is not None)
        with autocast, Recorder(model, moved, measure_memory=training) as recorder:
            run(model, moved)
    recording = recorder.recording()
    refuse_opaque(model, recording)
    return recording
