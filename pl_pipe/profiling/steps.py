"""How a model's training step is called, and where its loss comes from.

A LightningModule is recognised by its `training_step` and runs without a trainer: `self.log` and `self.log_dict` do
nothing. Any other module is called with the batch, and the mean of its floating-point outputs stands for the loss.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.errors import ProfileError
from pl_pipe.tensors.trees import map_tensors, tensors_in

Step = Callable[[nn.Module, Any], Any]
"""Runs the model on a batch and returns the loss, or a dictionary that holds it under "loss"."""

_REMEDY = "pass step=, a function of the model and the batch that returns the loss"
_LOGGING = ("log", "log_dict")


def is_lightning_module(model: nn.Module) -> bool:
    return callable(getattr(model, "training_step", None))


def default_step(model: nn.Module, batch: Any) -> Step:
    """The step that a batch of this form is meant for."""
    if is_lightning_module(model):
        if getattr(model, "automatic_optimization", True) is False:
            raise ProfileError(
                f"{type(model).__name__} sets automatic_optimization=False, so its training_step runs backward and the "
                f"optimizer itself and has no one forward and backward pass to measure; {_REMEDY}"
            )
        takes_index = _accepts(model.training_step, batch, 0)
        return _training_step if takes_index else _training_step_without_index
    return _forward_of(model, batch)


def loss_of(outcome: Any, model: nn.Module, *, from_outputs: bool) -> Tensor:
    """The scalar to run backward from; with `from_outputs` the mean of a model's outputs."""
    loss: Any = outcome.get("loss") if isinstance(outcome, Mapping) and "loss" in outcome else outcome
    if from_outputs and not (isinstance(loss, Tensor) and loss.dim() == 0):
        outputs = [tensor for tensor in tensors_in(outcome) if tensor.is_floating_point() and tensor.requires_grad]
        loss = torch.stack([tensor.float().mean() for tensor in outputs]).mean() if outputs else None
    name = type(model).__name__
    trains = getattr(model, "_trainer", None) is not None
    remedy = (
        "return a loss from training_step, of zero (loss * 0) where there is nothing to learn" if trains else _REMEDY
    )
    if outcome is None:
        raise ProfileError(f"the step of {name} returned None for this batch, so there is no loss; {remedy}")
    if not isinstance(loss, Tensor):
        found = "no floating-point output" if from_outputs else type(outcome).__name__
        raise ProfileError(f"the step of {name} returned {found} where a loss is needed; {remedy}")
    if loss.numel() != 1:
        raise ProfileError(f"the loss of {name} has shape {list(loss.shape)}, backward needs one number; {remedy}")
    if not loss.requires_grad:
        raise ProfileError(
            f"the loss of {name} needs no gradient, so there is no backward pass to measure; remove the detach() or "
            f"no_grad() that cuts it off from the parameters{'' if trains else f', or {_REMEDY}'}"
        )
    return loss


def mute(model: nn.Module) -> None:
    """Makes a LightningModule's logging do nothing; to be called where its attributes are restored afterwards."""
    for module in filter(is_lightning_module, model.modules()):
        vars(module).update(dict.fromkeys(_LOGGING, _nothing))


@contextmanager
def trainer_refused(model: nn.Module) -> Iterator[None]:
    """A step that cannot do without a trainer is refused with the remedy."""
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        missing = _missing_part(error)
        if missing is None:
            raise
        raise ProfileError(
            f"the step of {type(model).__name__} needs {missing}, but a profile is taken without a trainer; {_REMEDY}"
        ) from error


def move_batch(model: nn.Module, batch: Any, device: torch.device) -> Any:
    """The batch on `device`, by a LightningModule's own hooks where it has them."""
    if getattr(model, "_trainer", None) is not None:  # which knows whether the hooks are the data module's
        return model._apply_batch_transfer_handler(batch, device, 0)  # type: ignore[operator]
    if callable(getattr(model, "transfer_batch_to_device", None)):
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            arguments = (device, 0) if hook == "transfer_batch_to_device" else (0,)
            batch = getattr(model, hook)(batch, *arguments)
        return batch
    if not isinstance(batch, Tensor) and callable(getattr(batch, "to", None)):  # packed sequences, tokenizers' output
        return batch.to(device)
    return map_tensors(batch, lambda tensor: tensor.to(device))


def _training_step(model: nn.Module, batch: Any) -> Any:
    return model.training_step(batch, 0)  # type: ignore[operator]


def _training_step_without_index(model: nn.Module, batch: Any) -> Any:
    return model.training_step(batch)  # type: ignore[operator]


def _forward_of(model: nn.Module, batch: Any) -> Step:
    """A tuple or list is the model's arguments, a dictionary its keywords, anything else its only argument."""
    if isinstance(batch, Mapping) and _accepts(model.forward, **batch):
        return lambda model, batch: model(**batch)
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        if _accepts(model.forward, *batch):
            return lambda model, batch: model(*batch)
        raise ProfileError(
            f"the batch holds {len(batch)} values, which {type(model).__name__}.forward"
            f"{inspect.signature(model.forward)} does not take; pass step=, such as "
            f"lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
        )
    return lambda model, batch: model(batch)


def _accepts(function: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for `self.log`."""


def _missing_part(error: Exception) -> str | None:
    """What the step wanted of a trainer, if that is what the error is about."""
    if "is not attached to a `Trainer`" in str(error):
        return "self.trainer"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AttributeError) and "NoneType" in str(error) and "self.logger" in (frames[-1].line or ""):
        return "self.logger"
    return None
