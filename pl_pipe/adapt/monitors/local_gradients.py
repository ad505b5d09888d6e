"""A rank's own gradients, before they are averaged with the others'. autograd -> *LocalGradients* -> monitors.

A parameter's hook runs when its gradient is complete on this rank, and before DistributedDataParallel takes it away.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_HALVES = frozenset({torch.float16, torch.bfloat16})
_PIECE = 1 << 20
"""Elements that a float32 can add up without losing more than a hundred-thousandth."""


class LocalGradients:
    """The squared length of each parameter's gradient on this rank; `keep` also their squares, element by element."""

    def __init__(self, module: nn.Module, *, keep: bool = False) -> None:
        self._keep = keep
        self._parameters = [(name, one) for name, one in module.named_parameters() if one.requires_grad]
        self._hooks: list[Any] = []
        self.squared: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._parameters

    def listen(self) -> None:
        """To the backward that follows."""
        self.squared, self.squares = {}, {}
        if not self._hooks:
            for name, parameter in self._parameters:
                hook: Callable[..., Any] = partial(self._came, name)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def rest(self) -> None:
        """Costs nothing from now on."""
        while self._hooks:
            self._hooks.pop().remove()

    def _came(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self.squared[name] = squared_length(gradient)
        if self._keep and not gradient.is_sparse:
            self.squares[name] = gradient.detach().square()


def squared_length(tensor: Tensor) -> Tensor:
    """To a hundred-thousandth, in as few calls as can be: in the middle of backward each one costs.

    On CPUs `vector_norm` adds up float32 one by one: of 25 million elements it loses a hundredth.
    """
    is_half = tensor.dtype in _HALVES
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not tensor.is_cpu:
        length: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if is_half else None)
        return length.square()
    flat = tensor.reshape(-1)
    if is_half:
        flat = flat.float()
    if flat.numel() <= _PIECE:
        return torch.dot(flat, flat)
    return added_up(torch.dot(piece, piece) for piece in torch.split(flat, _PIECE))


def share_of_squares(parameters: Sequence[tuple[str, nn.Parameter]], rank: int, ranks: int) -> Tensor:
    """Gradients that are averaged are the same on all ranks, so each measures some; added up, it is all of them."""
    largest_first = sorted(parameters, key=lambda one: -one[1].numel())
    return added_up(squared_length(one.grad) for _, one in largest_first[rank::ranks] if one.grad is not None)


def added_up(squared: Iterable[Tensor]) -> Tensor:
    """In float64, so that large models do not lose the small differences that estimates live of."""
    found = [one.detach().double() for one in squared]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)
