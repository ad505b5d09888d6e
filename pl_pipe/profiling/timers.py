"""Divides a step's time among its layers.

Forward: the time inside each layer. Backward: autograd comes to the layers one after the other, and a hook where each
layer's part begins switches the time over to it, so that all the engine does on the way (adding gradients up at a
branch, storing a parameter's) is some layer's time:

    conv2 ─────────────────────────┐ relu1 ──┐ conv1 ───────────────┐ end
      kernels, then its parameters'
      gradients are stored
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from pl_pipe.profiling.clocks import Clock
from pl_pipe.tensors.interception import leaves_called_through
from pl_pipe.tensors.trees import tensors_in

_ROUNDS = 7
_CHAIN_LENGTH = 200
_LONG_ENOUGH_S = 2e-3
_MARGIN_S = 1e-4
_NOBODY = -1


@dataclass(frozen=True)
class TimingCost:
    """What looking costs: time that the timer itself adds to what it measures."""

    span_s: float
    """Two marks with nothing between them."""
    switch_s: float
    """A hook at an autograd node."""


@dataclass(frozen=True)
class Holds:
    """How long to hold the device's queue before each piece of a pass: longer than the host took for it."""

    forward_s: Sequence[float] = ()
    backward_s: Sequence[float] = ()


class LayerTimer:
    """Times one pass: a LayerWatch of the recorder's in the forward, hooks on autograd's nodes in the backward."""

    def __init__(self, clock: Clock, holds: Holds | None = None) -> None:
        self._clock = clock
        self._holds = holds or Holds()
        self._start: Any = None
        self._pieces: list[tuple[Any, Any]] = []
        self._spans: list[tuple[int, Any, Any]] = []
        self._switches: list[tuple[int, Any, Any]] = []  # to whom; when the one before ended; when this one began
        self._layer_of: dict[nn.Module, int] = {}

    def start(self) -> None:
        self._hold(self._holds.forward_s, len(self._pieces))
        self._start = self._clock.mark()

    def stop(self) -> None:
        self._pieces.append((self._start, self._clock.mark()))

    def credit(self, layer: int, module: nn.Module | None) -> None:
        self._spans.append((layer, *self._pieces[-1]))
        if module is not None:
            self._layer_of.setdefault(module, layer)

    def own(self, layer: int, node: Node) -> None:
        node.register_prehook(partial(self._switch, layer))

    @contextmanager
    def backward(self, model: nn.Module) -> Iterator[None]:
        """Times the backward pass run inside."""
        with leaves_called_through(model, self._replay):
            yield
        self._switch(_NOBODY)

    def times(self, layers: int, cost: TimingCost) -> tuple[list[float], list[float]]:
        """Seconds of each layer, forward and backward; call it after the clock has settled."""
        forward_s, backward_s = [0.0] * layers, [0.0] * layers
        for layer, start, end in self._spans:
            forward_s[layer] += max(0.0, self._clock.seconds(start, end) - cost.span_s)
        for (layer, _, start), (_, end, _) in zip(self._switches, self._switches[1:], strict=False):
            backward_s[layer] += max(0.0, self._clock.seconds(start, end) - cost.switch_s)
        return forward_s, backward_s

    def holds(self) -> Holds:
        """Times to hold the queue for in a pass like this one, which was timed by the host's clock."""
        switches = zip(self._switches, self._switches[1:], strict=False)
        return Holds(
            forward_s=[self._clock.seconds(start, end) for start, end in self._pieces],
            backward_s=[self._clock.seconds(start, end) for (_, _, start), (_, end, _) in switches],
        )

    def _hold(self, seconds: Sequence[float], number: int) -> None:
        if number < len(seconds):
            self._clock.hold(2 * seconds[number] + _MARGIN_S)

    def _switch(self, layer: int, *_: Any) -> None:
        end = start = self._clock.mark()
        if len(self._switches) < len(self._holds.backward_s):
            self._hold(self._holds.backward_s, len(self._switches))
            start = self._clock.mark()
        self._switches.append((layer, end, start))

    def _replay(
        self, module: nn.Module, _: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Activation checkpointing runs a leaf's forward again in the backward: that time is the leaf's."""
        layer = self._layer_of.get(module)
        if layer is None or not self._switches:
            return plain(*args, **kwargs)
        interrupted = self._switches[-1][0]
        self._switch(layer)
        try:
            out = plain(*args, **kwargs)
            for tensor in tensors_in(out):
                if tensor.grad_fn is not None:
                    self.own(layer, tensor.grad_fn)
            return out
        finally:
            self._switch(interrupted)


def host_cost(clock: Clock, device: torch.device) -> TimingCost:
    """Measures what looking costs by the host's clock: hooks are slow calls from autograd's engine into Python."""
    plain_s = median(_chain_seconds(clock, device, hooked=False) for _ in range(_ROUNDS))
    hooked_s = median(_chain_seconds(clock, device, hooked=True) for _ in range(_ROUNDS))
    return TimingCost(span_s=_span_seconds(clock), switch_s=max(0.0, (hooked_s - plain_s) / _CHAIN_LENGTH))


def device_cost(clock: Clock) -> TimingCost:
    """Measures what looking costs by a device's clock, which does not wait for hooks."""
    span_s = _span_seconds(clock)
    return TimingCost(span_s=span_s, switch_s=span_s)


def _span_seconds(clock: Clock) -> float:
    """The time between two marks with nothing between them."""
    spans_s: list[float] = []
    for _ in range(_ROUNDS):
        clock.hold(_LONG_ENOUGH_S)
        marks = [(clock.mark(), clock.mark()) for _ in range(_CHAIN_LENGTH // 4)]
        clock.settle()
        spans_s += [clock.seconds(start, end) for start, end in marks]
    return median(spans_s)


def _chain_seconds(clock: Clock, device: torch.device, *, hooked: bool) -> float:
    """The backward of a chain of nodes that do next to nothing, with or without the timer's hooks."""
    timer = LayerTimer(clock)
    tensor: Tensor = torch.ones((), device=device, requires_grad=True)
    for _ in range(_CHAIN_LENGTH):
        tensor = tensor.view_as(tensor)
        if hooked and tensor.grad_fn is not None:
            timer.own(0, tensor.grad_fn)
    start = clock.mark()
    tensor.backward()  # type: ignore[no-untyped-call]
    end = clock.mark()
    clock.settle()
    return clock.seconds(start, end)
