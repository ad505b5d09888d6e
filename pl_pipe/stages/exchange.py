"""One batch's transfers of one rank: numbered, led through autograd, and answered by gradients.

    forward   source ── value n ──► target       source keeps the place in its graph, not the tensor
    backward  source ◄─ gradient n ── target     sent the moment autograd has it

The n-th value from one stage to another is the same on both, because both keep the same books. In a hook, some lines of
which one rank may run alone, it is the n-th for the same lines.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pl_pipe.comm import Direction, Message, Transport, Wire
from pl_pipe.tensors.ghosts import TensorSpec


@dataclass
class _Sent:
    message: Message
    edge: GradientEdge
    spec: TensorSpec


@dataclass
class _Received:
    message: Message
    spec: TensorSpec
    gradient: Tensor | None = None
    """Until it is sent."""
    answered: bool = False


class Keeper(Protocol):
    """Remembers a batch's transfers, so that its step can be run again."""

    def came(self, arrival: Tensor, entered: Tensor) -> None:
        """What came, and the tensor that the step works with, which may lie in the same memory."""

    def went(self, tensor: Tensor) -> None: ...


class BatchExchange:
    """Sends and receives of one batch on one rank."""

    def __init__(
        self,
        transport: Transport,
        *,
        stage: int,
        batch: int,
        device: torch.device,
        wire: Wire = Wire(),  # noqa: B008 - it is frozen
    ) -> None:
        self.arrivals: list[tuple[Message, TensorSpec]] = []
        """All that was received, in order: what to announce for the next batch of this signature."""
        self.departures = 0
        self.keeper: Keeper | None = None
        self.has_backward = True
        """Otherwise it is a hook's, in which one rank may ask what the others do not."""
        self._transport = transport
        self._stage = stage
        self._batch = batch
        self._device = device
        self._wire = wire
        self._counts: dict[tuple[int, int, int], int] = {}
        self._sent: list[_Sent] = []
        self._received: list[_Received] = []

    def announce(self, arrivals: list[tuple[Message, TensorSpec]]) -> None:
        """Receives what an earlier batch of the same signature received may start."""
        for message, spec in arrivals:
            self._transport.expect(message._replace(batch=self._batch), self._wire.spec(message, spec))

    def rounds(self, dtype: torch.dtype) -> bool:
        return self._wire.rounds(dtype)

    def send(self, tensor: Tensor, target: int, *, exact: bool = False, place: int = 0) -> None:
        message = self._next(self._stage, target, exact, place)
        self.departures += 1
        self._dispatch(message, tensor.detach())
        if tensor.requires_grad and self.has_backward:
            sent = _Sent(message, get_gradient_edge(tensor), TensorSpec.of(tensor))
            self._sent.append(sent)
            self._await_answer(sent)

    def receive(self, source: int, spec: TensorSpec, *, exact: bool = False, place: int = 0) -> Tensor:
        message = self._next(source, self._stage, exact, place)
        self.arrivals.append((message, spec))
        arrival = self._fetch(message, spec)
        entered = self._entered(message, spec, laid_out(arrival.to(spec.dtype), spec))
        if self.keeper is not None:
            self.keeper.came(arrival, entered)
        return entered

    def _entered(self, message: Message, spec: TensorSpec, buffer: Tensor) -> Tensor:
        if not spec.requires_grad or not self.has_backward:
            return buffer
        entry = _Received(message, spec)
        self._received.append(entry)
        with torch.enable_grad():
            root = torch.zeros((), requires_grad=True)
            entered: Tensor = _Entry.apply(root, buffer, self, entry)  # type: ignore[no-untyped-call]
            return entered

    def forget(self) -> None:
        """Lets go of the graph: a repetition will stand in for this exchange in backward."""
        self._sent.clear()
        self._received.clear()
        self.keeper = None  # its owner outlives it till a sweep

    def backward(self, loss: Tensor | None) -> None:
        """Runs this rank's part of backward: from the loss, if it is here, and from all that was sent."""
        roots: list[Tensor | GradientEdge] = []
        gradients: list[Tensor | None] = []
        if loss is not None:
            roots.append(loss)
            gradients.append(None)
        for sent in self._sent:
            answer = self._transport.receive(_answer(sent.message), self._wire.spec(sent.message, sent.spec))
            if is_none(answer):
                continue
            roots.append(sent.edge)
            gradients.append(laid_out(answer.to(sent.spec.dtype), sent.spec))
        if roots:
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]
        for entry in self._received:
            if not entry.answered and entry.gradient is None:  # nothing here depends on it
                self.answer(entry, no_gradient(self._wire.spec(entry.message, entry.spec), self._device))
        self._sent.clear()
        self._received.clear()

    def answer(self, entry: _Received, gradient: Tensor) -> None:
        entry.gradient = gradient
        for due in self._due(entry.message.source) if self._transport.in_order else (entry,):
            assert due.gradient is not None
            self._transport.send(_answer(due.message), self._wire.narrowed(due.message, due.gradient))
            due.gradient, due.answered = None, True

    def _due(self, source: int) -> Iterable[_Received]:
        """What can be answered where gradients must go in the order of their numbers, in which autograd has no part."""
        for entry in self._received:
            if entry.message.source == source and not entry.answered:
                if entry.gradient is None:
                    return
                yield entry

    def leave_out(self, source: int, target: int, place: int) -> None:
        """What would be sent here is on the other side; both count it."""
        self._next(source, target, False, place)

    def _next(self, source: int, target: int, exact: bool, place: int) -> Message:
        number = self._counts.get((source, target, place), 0)
        self._counts[source, target, place] = number + 1
        return Message(source, target, self._batch, number, Direction.FORWARD, exact, place)

    # ---- what a repetition does otherwise

    def _dispatch(self, message: Message, tensor: Tensor) -> None:
        content = self._wire.narrowed(message, tensor)
        if self.has_backward:
            self._transport.send(message, content)
        else:
            self._transport.send(message, content, perhaps=True)
        if self.keeper is not None:
            self.keeper.went(tensor)

    def _await_answer(self, sent: _Sent) -> None:
        self._transport.expect(_answer(sent.message), self._wire.spec(sent.message, sent.spec))

    def _fetch(self, message: Message, spec: TensorSpec) -> Tensor:
        return self._transport.receive(message, self._wire.spec(message, spec))


_NONE = {8: (torch.int64, 0x7FF8_0000_BEEF_BEEF), 4: (torch.int32, 0x7FC0_BEEF), 2: (torch.int16, 0x7FEB)}
"""By the bytes of a number: one that is none, as arithmetic does not make it, in every place of what is no gradient."""


def no_gradient(spec: TensorSpec, device: torch.device) -> Tensor:
    """Stands for no gradient, which is another thing than zeros: an optimizer leaves what has none alone."""
    if not spec.dtype.is_floating_point or spec.dtype.itemsize not in _NONE:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    kind, number = _NONE[spec.dtype.itemsize]
    return torch.full(spec.shape, number, dtype=kind, device=device).view(spec.dtype)


def is_none(gradient: Tensor) -> bool:
    if not gradient.dtype.is_floating_point or gradient.dtype.itemsize not in _NONE or not gradient.numel():
        return False
    kind, number = _NONE[gradient.dtype.itemsize]
    return bool(gradient.view(kind).reshape(-1)[0] == number)


class _Entry(torch.autograd.Function):
    """A received buffer enters the graph: no leaf (in-place operations are allowed), and no copy."""

    @staticmethod
    def forward(ctx: Any, _root: Tensor, buffer: Tensor, exchange: BatchExchange, entry: _Received) -> Tensor:
        ctx.exchange, ctx.entry = exchange, entry
        alias = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        return alias.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.size(), buffer.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None, None]:
        ctx.exchange.answer(ctx.entry, gradients[0])
        return None, None, None, None


def _answer(message: Message) -> Message:
    return message._replace(source=message.target, target=message.source, direction=Direction.BACKWARD)


def laid_out(buffer: Tensor, spec: TensorSpec) -> Tensor:
    """The strides that the tensor has in the single run, where they differ (permuted, channels last)."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    if buffer.stride() == spec.stride or span != buffer.numel():
        return buffer
    found = torch.empty_strided(spec.shape, spec.stride, dtype=buffer.dtype, device=buffer.device)
    return found.copy_(buffer)
