"""Where a step is looked at, and what must hold there. model, batch -> *place* -> passes, recorded_step."""

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.errors import ProfileError
from pl_pipe.profiling.preserve import kept_as_it_was
from pl_pipe.profiling.steps import move_batch, mute, trainer_refused
from pl_pipe.tensors import Recording, refuse_lazy
from pl_pipe.tensors.trees import map_tensors


def place_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The device to run on: `device`, or where the model's parameters are. Refuses a model that cannot run at all."""
    refuse_lazy(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        name = type(model).__name__
        raise ProfileError(f"{name} has parameters on the meta device, which computes nothing; load its weights first")
    parameter = next(model.parameters(), None)
    place = torch.device(device or ("cpu" if parameter is None else parameter.device))
    if place.type not in ("cpu", "cuda"):
        raise ProfileError(f"device={place} cannot be measured; choose cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError(f"device={place}, but torch sees no CUDA device here; leave device out or set cpu")
    if place == torch.device("cuda"):  # without a number: the current one
        return torch.device("cuda", torch.cuda.current_device())
    return place


def device_name(place: torch.device) -> str:
    """`cuda:0 (NVIDIA H200)`, `cpu (aarch64, 2 threads)`: what a profile's times are good for."""
    if place.type == "cuda":
        return f"{place} ({torch.cuda.get_device_name(place)})"
    return f"{place} ({platform.machine()}, {torch.get_num_threads()} threads)"


@contextmanager
def ready_to_run(model: nn.Module, batch: Any, place: torch.device, *, training: bool = True) -> Iterator[Any]:
    """Inside, the model stands on `place` with its logging mute, and the copy of the batch that is given does too.

    In training, gradients are on, whatever the caller set, and parts in evaluation mode stay so; else they are off. The
    model is left exactly as it was.
    """
    with ExitStack() as stack:
        stack.enter_context(kept_as_it_was(model))
        stack.enter_context(trainer_refused(model))
        if place.type == "cuda":
            stack.enter_context(torch.cuda.device(place))  # events are recorded on the current device
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(training))
        mute(model)
        for parameter in model.parameters():
            parameter.grad = None  # before moving, which would move the user's gradients too
        model.to(place)
        if not (training and model.training):
            model.train(training)
        yield move_batch(model, map_tensors(batch, Tensor.clone), place)


def refuse_opaque(model: nn.Module, recording: Recording) -> None:
    """Refuses a recording of nothing but the batch."""
    if len(recording.layer_names) == 1:
        raise ProfileError(
            f"no layer of {type(model).__name__} was seen to run; scripted and compiled models are opaque: "
            f"profile the module they were made from"
        )
