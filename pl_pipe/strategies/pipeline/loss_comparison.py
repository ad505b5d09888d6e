"""Whether a batch's loss is what those of its micro-batches add up to, by the first batch. plan -> *this* -> warning.

A mean over samples is; a mean over the elements that a mask leaves, over pairs of samples, or after a state that one
step hands to the next, is another number.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.log import get_logger
from pl_pipe.profiling.place import ready_to_run
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.profiling.steps import default_step, loss_of
from pl_pipe.runtime.micro_batches import MicroBatch
from pl_pipe.stages.loss_counts import loss_over_parts
from pl_pipe.tensors.trees import map_tensors

_TOLERANCE = 1e-4
_log = get_logger(__name__)


def warn_of_other_loss(
    model: nn.Module, batch: Any, parts: Sequence[MicroBatch], *, device: torch.device, context: Callable[[], Any]
) -> None:
    """Without dropout, and with the statistics that batch norm has; a step that draws numbers cannot be compared."""
    try:
        whole, together, again = _losses(model, batch, parts, device, context)
    except Exception as error:  # it is the run's to meet, if it meets it
        _log.info("the loss of micro-batches was not compared with their batch's: %r", error)
        return
    if not _differ(whole, together) or _differ(whole, again, _TOLERANCE / 10):
        return
    _log.warning(
        "the first batch has a loss of %.6g as a whole, and %.6g by its %d micro-batches: training_step of %s returns "
        "no mean over samples (a mask, pairs of samples, a state kept for the next step), so weights will not be those "
        "of one device; set num_microbatches=1, or let cross_entropy(ignore_index=...) leave elements out, which is "
        "weighed",
        whole, together, len(parts), type(model).__name__,
    )  # fmt: skip


def _losses(
    model: nn.Module, batch: Any, parts: Sequence[MicroBatch], device: torch.device, context: Callable[[], Any]
) -> tuple[float, float, float]:
    """Of the batch, of its parts together, and of the batch again with other random numbers; all from one state."""
    with ready_to_run(model, batch, device, training=False) as moved:
        run = default_step(model, moved)

        def step(content: Any) -> Tensor:
            with context():
                outcome = run(model, map_tensors(content, Tensor.clone))
            loss: Any = outcome.get("loss") if isinstance(outcome, dict) else outcome
            return loss_of(loss.detach().requires_grad_(), model, from_outputs=False)

        contents = [map_tensors(part.content, lambda tensor: tensor.to(device)) for part in parts]
        shares = [part.share for part in parts]
        state, draws = ModelState(model, weights=False), RandomState()

        def begin() -> None:
            state.restore()
            draws.restore()

        with torch.no_grad():
            whole = float(step(moved))
            together = loss_over_parts(step, contents, shares, begin=begin)
            if not _differ(whole, together):
                return whole, together, whole
            state.restore()  # and other random numbers
            return whole, together, float(step(moved))


def _differ(one: float, other: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(one - other) > tolerance * max(abs(one), 1e-6)
