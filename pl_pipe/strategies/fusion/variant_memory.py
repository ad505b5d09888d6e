"""What one variant takes while it is trained, measured on a real batch. step, optimizer -> *memory* -> array's width.

Weights and gradients can be counted. What an optimizer keeps is seen after a step of a copy of it, and what a step
keeps for its backward only when it runs: for one variant, and taken back.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.strategies.fusion.step_formulation import loss_of
from pl_pipe.strategies.fusion.step_undo import KeptBatch, UsersParts
from pl_pipe.strategies.fusion.variant_building import described
from pl_pipe.tensors.saved import SavedBytes
from pl_pipe.tensors.trees import tensors_in
from pl_pipe.units import format_bytes

log = get_logger(__name__)

_USUAL_STATES = 2
"""Of an optimizer that cannot be tried: as many for each weight as Adam keeps."""


class NotPutBackError(FusionError):
    """The step that was to leave no trace has left one."""


@dataclass(frozen=True)
class VariantMemory:
    weights_bytes: int
    """With buffers."""
    gradients_bytes: int
    """Twice those of the weights where batches add up: what earlier ones gave is kept until a step has not failed."""
    optimizer_bytes: int
    activations_bytes: int
    """On a GPU the most that a step takes besides, so also what its backward needs in passing."""

    @property
    def kept_bytes(self) -> int:
        """From step to step."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        return self.kept_bytes + self.activations_bytes

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)} (weights {format_bytes(self.weights_bytes)}, gradients "
            f"{format_bytes(self.gradients_bytes)}, optimizer {format_bytes(self.optimizer_bytes)}, activations "
            f"{format_bytes(self.activations_bytes)})"
        )


def memory_of(
    module: L.LightningModule,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
    accumulates: bool = False,
) -> VariantMemory:
    """Leaves no trace: module, metrics, batch and generators are then as they were, and nothing is logged."""
    random = RandomState()
    try:
        return VariantMemory(
            bytes_of((*module.parameters(), *module.buffers())),
            bytes_of(one for one in module.parameters() if one.requires_grad) * (2 if accumulates else 1),
            _optimizer_bytes(optimizer),
            _activations_bytes(module, args, kwargs, context, device),
        )
    finally:
        random.restore()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _optimizer_bytes(optimizer: Optimizer) -> int:
    try:
        tried = copy.deepcopy(optimizer)
        for group in tried.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        tried.step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        log.debug("%s is taken to keep %d states: %s", type(optimizer).__name__, _USUAL_STATES, described(error))
        weights = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        return _USUAL_STATES * bytes_of(weights)
    return bytes_of(value for value in tree_leaves(dict(tried.state)) if isinstance(value, Tensor))


def _activations_bytes(
    module: L.LightningModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> int:
    state, batch = ModelState(module), KeptBatch(args)
    parts = UsersParts(module)
    collected, iterators = parts.state(), parts.iterators()
    again: list[Any] = []

    def step() -> Any:
        vars(module)["log"] = _unheard
        for part, name in iterators:  # what they give now they give once more
            vars(part)[name], second = itertools.tee(vars(part)[name])
            again.append(second)
        with context():
            return module.training_step(*args, **kwargs)

    def ask_again() -> None:
        for (part, name), second in zip(iterators, again, strict=False):
            vars(part)[name] = second
        again.clear()

    def put_back() -> None:
        try:
            with ExitStack() as all_of_it:  # also after one has failed; the last comes first
                for restore in (ask_again, collected.restore, state.restore, batch.put_back):
                    all_of_it.callback(restore)
        except Exception as error:
            raise NotPutBackError(
                f"a step that measures memory could not be taken back ({described(error)}); "
                "give max_array a number, and none is measured"
            ) from error

    if device.type == "cuda":
        return _peak_bytes(step, put_back, device)
    known = SavedBytes((*module.parameters(), *module.buffers(), *tensors_in(args)))
    try:
        with known.hooks():
            step()
    finally:
        put_back()
    return known.take()


def _peak_bytes(step: Callable[[], Any], put_back: Callable[[], None], device: torch.device) -> int:
    """Of the second of two steps: in the first, cuDNN tries algorithms that take more than the one it will use."""
    peak_bytes = 0
    for _ in range(2):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            loss = loss_of(step())
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
            peak_bytes = torch.cuda.max_memory_allocated(device) - before
        finally:
            put_back()
    return peak_bytes


def _unheard(*_: Any, **__: Any) -> None:
    """What a step that is taken back would log."""
