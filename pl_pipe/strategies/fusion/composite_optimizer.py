"""The variants' optimizers as the one that Lightning's automatic optimization takes.

Each variant keeps its own optimizer, of any kind, and its own GradScaler: what is not finite in one keeps no other from
its step.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.strategies.fusion.replayed_optimizers import ReplayedOptimizers


class CompositeOptimizer(Optimizer):
    """Shows the parameter groups of all; a step is a step of each that is still trained."""

    def __init__(self, optimizers: Sequence[Optimizer], scaler: GradScaler | None) -> None:
        self.own = list(optimizers)
        self.scalers = [copy.deepcopy(scaler) if scaler is not None else None for _ in optimizers]
        self.active = list(range(len(self.own)))
        """Places of the variants that are still trained."""
        self.replayed: ReplayedOptimizers | None = None
        """Steps of all at once, where gradients are those of a replay."""
        super().__init__([{"params": [torch.zeros(0, requires_grad=True)]}], {})
        self._show()

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        out = None if closure is None else closure()
        if self.replayed is not None and self.replayed.step():
            return out
        for place in self.active:
            scaler = self.scalers[place]
            if scaler is None:
                self.own[place].step()
            elif self._has_gradients(place):
                scaler.step(self.own[place])  # skips a variant whose gradients are not finite
                scaler.update()
        return out

    def unscale(self) -> None:
        """Before gradients are looked at or clipped."""
        for place in self.active:
            scaler = self.scalers[place]
            if scaler is not None and self._has_gradients(place) and not _optimizer_handles_unscaling(self.own[place]):
                scaler.unscale_(self.own[place])

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for place in self.active:
            self.own[place].zero_grad(set_to_none=set_to_none)

    def scale(self, place: int) -> torch.Tensor | float:
        """What the variant's loss is multiplied with."""
        scaler = self.scalers[place]
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=_device(self.own[place])))

    def keep(self, active: Sequence[int]) -> None:
        """Only these places are trained from now on."""
        self.active = list(active)
        self.replay(None)
        self._show()

    def replay(self, device: torch.device | None) -> None:
        """Whether, and where, steps may be captured from now on."""
        if self.replayed is not None:
            self.replayed.plain_steps()
        can_be = device is not None and not any(scaler is not None for scaler in self.scalers)
        self.replayed = ReplayedOptimizers([self.own[place] for place in self.active], device) if can_be else None  # type: ignore[arg-type]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Of the first; checkpoints hold each variant's own."""
        return self.own[0].state_dict()

    def _show(self) -> None:
        self.param_groups = [group for place in self.active for group in self.own[place].param_groups]

    def _has_gradients(self, place: int) -> bool:
        return any(one.grad is not None for group in self.own[place].param_groups for one in group["params"])


def _device(optimizer: Optimizer) -> torch.device:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.device
