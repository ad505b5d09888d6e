"""A layer that takes as long as a recorded one, and leaves as many bytes. LayerNode -> *RecordedLayer* -> module.

    forward    ├─ output ─┤··········sleep··········┤      until the recorded time is over
    backward   ├─ gradients ─┤···········sleep···········┤

Numbers are zeros that take next to no memory and no work: an activation is one number seen many times over, a
gradient of weights lies in memory that the system has not given out yet. Both become real bytes where something real
reads them: a message, an all-reduce, a copy of the weights.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import override

from pl_pipe.graph import LayerNode
from pl_pipe.log import get_logger
from pl_pipe.units import format_seconds

ITEM_BYTES = 4
_PROMISED = "_recorded_gradient_promised"
_NOTICEABLE_S = 1e-3

_log = get_logger(__name__)


class RecordedLayer(nn.Module):
    """One node of a recorded graph."""

    said_late = False
    """Of all layers together: one word about it is enough."""

    def __init__(self, node: LayerNode, *, dilation: float, batch_size: int) -> None:
        super().__init__()
        self.node_name = node.name
        self.forward_s = node.forward_s * dilation
        self.backward_s = node.backward_s * dilation
        self.batch_size = batch_size
        self.output_items = items_in(node.total_output_bytes)
        """Several outputs of a node are one tensor here: a graph does not tell who takes which."""
        self.gives_gradient = True
        """Otherwise only where a hook waits for it."""
        items = items_in(node.parameter_bytes)
        self.weight = nn.Parameter(zeros_not_yet_there(items, torch.device("cpu"))) if items else None

    @override
    def forward(self, samples: int, *inputs: Tensor) -> Tensor:
        """The output for so many samples: a part of the recorded batch takes its share of time and bytes."""
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())  # backward comes by, whatever the inputs
        promised = [_is_first_user(tensor) for tensor in inputs]
        output: Tensor = _Recorded.apply(self, samples / self.batch_size, promised, anchor, self.weight, *inputs)  # type: ignore[no-untyped-call]
        return output

    @override
    def extra_repr(self) -> str:
        return f"{self.node_name}, forward_s={self.forward_s:g}, backward_s={self.backward_s:g}"

    def owes_gradient(self, weight: Tensor | None) -> bool:
        """Whether anybody reads one. Zeros change nothing, and to add them up or to divide them, which a GPU does in no
        time, would here be most of the time that a layer takes."""
        if weight is None or weight.grad is not None:
            return weight is not None and bool(weight._post_accumulate_grad_hooks)
        return self.gives_gradient or bool(weight._post_accumulate_grad_hooks)

    def rest(self, start_s: float, wanted_s: float) -> None:
        """Sleeps until `wanted_s` have gone by since the start. (Of 0 s, no dilation makes more.)"""
        worked_s = time.perf_counter() - start_s
        if worked_s < wanted_s:
            time.sleep(wanted_s - worked_s)
        elif wanted_s and worked_s - wanted_s > max(_NOTICEABLE_S, wanted_s / 10) and not RecordedLayer.said_late:
            RecordedLayer.said_late = True
            _log.warning(
                "layer %s took %s for its real work alone, the record says %s: where that goes on, this machine is "
                "measured and not the record; set a larger recipe.dilation, or leave the machine more idle",
                self.node_name, format_seconds(worked_s), format_seconds(wanted_s),
            )  # fmt: skip


class _Recorded(torch.autograd.Function):
    """Sleeps, forward and backward, between a layer's inputs, its weight and its output."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: RecordedLayer,
        share: float,
        promised: list[bool],
        _anchor: Tensor,
        weight: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        start_s = time.perf_counter()
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.share = layer, share
        ctx.shapes = [
            tensor.shape if promise and tensor.is_floating_point() else None
            for tensor, promise in zip(inputs, promised, strict=True)
        ]
        ctx.weight = weight
        ctx.device = (inputs[0] if weight is None else weight).device
        output = seen_many_times((round(layer.output_items * share),), ctx.device)
        if not any(_is_only_a_shape(tensor) for tensor in (weight, *inputs)):
            layer.rest(start_s, layer.forward_s * share)
        return output

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor | None) -> tuple[Any, ...]:
        start_s = time.perf_counter()
        layer: RecordedLayer = ctx.layer
        of_inputs = [None if shape is None else seen_many_times(shape, ctx.device) for shape in ctx.shapes]
        of_weight = zeros_not_yet_there(ctx.weight.numel(), ctx.device) if layer.owes_gradient(ctx.weight) else None
        layer.rest(start_s, layer.backward_s * ctx.share)
        return None, None, None, None, of_weight, *of_inputs


def items_in(size_bytes: int) -> int:
    """Floats that take so many bytes."""
    return -(-size_bytes // ITEM_BYTES)


def seen_many_times(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros of any size, in the memory of one."""
    return torch.zeros(1, device=device).expand(shape)


def zeros_not_yet_there(items: int, device: torch.device) -> Tensor:
    """Zeros of their own, whose memory the system gives out when they are first touched. (torch fills its own.)"""
    if device.type != "cpu":
        return torch.zeros(items, device=device)
    return torch.from_numpy(np.zeros(items, dtype=np.float32))


def _is_only_a_shape(tensor: Tensor | None) -> bool:
    """Whether another rank runs the layer, and this one only asks what would come out."""
    return tensor is not None and (tensor.is_meta or isinstance(tensor, FakeTensor))


def _is_first_user(tensor: Tensor) -> bool:
    """Whether no other layer of this process has taken the tensor yet.

    One user's gradient of zeros is enough for all: autograd would add up the others, at the cost of real work.
    """
    if hasattr(tensor, _PROMISED):
        return False
    setattr(tensor, _PROMISED, True)
    return True
