"""A step whose own Python runs backward and the optimizer: one batch at a time, all ranks in step. Pipe -> *this*.

Values go to earlier stages as well as to later ones, so gradients have no one direction either. Each transfer is a node
of autograd's graph on both sides, and autograd goes through a rank's nodes in the reverse of the order in which they
were made. That order is the same on all ranks, so a rank that waits for a gradient waits for one that will come:

    forward    rank 0: f ── send 1 ── recv 2 ── g          backward   rank 0: g' ── send 2' ── recv 1' ── f'
               rank 1:      recv 1 ── h ── send 2                     rank 1:       recv 2' ── h' ── send 1'
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from pl_pipe.comm import Direction, Message
from pl_pipe.stages.exchange import BatchExchange, is_none, laid_out, no_gradient
from pl_pipe.tensors.ghosts import TensorSpec

_FLAG = TensorSpec((1,), (1,), torch.bool, False)


@dataclass
class _Transfer:
    message: Message
    spec: TensorSpec
    root: Tensor | None
    """On the source: what backward starts from to come to this place of the graph."""
    entry: Any = None
    """On the target: the node at which the value entered the graph."""
    answer: Message | None = None
    has_gradient: bool = False


class LockstepExchange(BatchExchange):
    """Sends and receives of one batch, with as many backwards as the step asks for."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._live: list[_Transfer] = []
        self._answers: dict[tuple[int, int], int] = {}

    @override
    def send(self, tensor: Tensor, target: int, *, exact: bool = False, place: int = 0) -> None:
        message = self._next(self._stage, target, exact, place)
        self._dispatch(message, tensor.detach())
        if tensor.requires_grad:
            transfer = _Transfer(message, TensorSpec.of(tensor), None)
            with torch.enable_grad():
                transfer.root = _Exit.apply(tensor, self, transfer)  # type: ignore[no-untyped-call]
            self._live.append(transfer)

    @override
    def _entered(self, message: Message, spec: TensorSpec, buffer: Tensor) -> Tensor:
        if not spec.requires_grad:
            return buffer
        transfer = _Transfer(message, spec, None)
        with torch.enable_grad():
            root = torch.zeros((), requires_grad=True)
            entered: Tensor = _Entry.apply(root, buffer, self, transfer)  # type: ignore[no-untyped-call]
        transfer.entry = entered.grad_fn
        self._live.append(transfer)
        return entered

    def run_backward(self, loss: Tensor | None, gradient: Tensor | None, *, retain_graph: bool) -> None:
        """This rank's part of `loss.backward()`; the loss is None where it is not this stage's."""
        roots = [] if loss is None else [loss]
        gradients: list[Tensor | None] = [] if loss is None else [gradient]
        for transfer in self._taking_part(roots):
            roots.append(transfer)
            gradients.append(torch.zeros(()))
        if roots:
            torch.autograd.backward(roots, gradients, retain_graph=retain_graph)  # type: ignore[arg-type]
        if not retain_graph:
            self._live = [transfer for transfer in self._live if not transfer.has_gradient]

    def _taking_part(self, roots: list[Tensor]) -> list[Tensor]:
        """What else backward starts from on this rank: values that it has sent, and that the loss depends on.

        The target of each transfer knows, if it knows so of all later ones. A graph that is gone since an earlier
        backward must not be entered again.
        """
        for transfer in self._live:
            pair = (transfer.message.source, transfer.message.target)
            number = self._answers[pair] = self._answers.get(pair, -1) + 1
            transfer.answer = transfer.message._replace(
                source=pair[1], target=pair[0], number=2 * number, direction=Direction.BACKWARD
            )
        found: list[Tensor] = []
        reached: set[Any] = set()
        _reach(reached, roots)
        for transfer in reversed(self._live):
            assert transfer.answer is not None
            told = transfer.answer._replace(number=transfer.answer.number + 1, exact=True)
            if transfer.root is None:
                transfer.has_gradient = transfer.entry in reached
                self._transport.send(told, torch.tensor([transfer.has_gradient], device=self._device))
                continue
            transfer.has_gradient = bool(self._transport.receive(told, _FLAG))
            if transfer.has_gradient:
                found.append(transfer.root)
                _reach(reached, [transfer.root])
        return found

    def answer_with(self, transfer: _Transfer, gradient: Tensor | None) -> None:
        assert transfer.answer is not None
        if gradient is None:
            content = no_gradient(self._wire.spec(transfer.message, transfer.spec), self._device)
        else:
            content = self._wire.narrowed(transfer.message, gradient)
        self._transport.send(transfer.answer, content)

    def answer_to(self, transfer: _Transfer) -> Tensor | None:
        assert transfer.answer is not None
        answer = self._transport.receive(transfer.answer, self._wire.spec(transfer.message, transfer.spec))
        return None if is_none(answer) else laid_out(answer.to(transfer.spec.dtype), transfer.spec)

    @override
    def forget(self) -> None:
        """The step is over: nothing goes back through it any more."""
        self._live.clear()


def _reach(reached: set[Any], roots: list[Tensor]) -> None:
    """Adds the nodes behind these."""
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    reached.update(pending)
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is not None and following not in reached:
                reached.add(following)
                pending.append(following)


class _Exit(torch.autograd.Function):
    """A value leaves this rank here: backward waits for its gradient."""

    @staticmethod
    def forward(ctx: Any, _tensor: Tensor, exchange: LockstepExchange, transfer: _Transfer) -> Tensor:
        ctx.exchange, ctx.transfer = exchange, transfer
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.exchange.answer_to(ctx.transfer), None, None


class _Entry(torch.autograd.Function):
    """A received buffer enters the graph: backward sends its gradient home."""

    @staticmethod
    def forward(ctx: Any, _root: Tensor, buffer: Tensor, exchange: LockstepExchange, transfer: _Transfer) -> Tensor:
        ctx.exchange, ctx.transfer = exchange, transfer
        ctx.set_materialize_grads(False)
        alias = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        return alias.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.size(), buffer.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        ctx.exchange.answer_with(ctx.transfer, gradients[0])
        return None, None, None, None
