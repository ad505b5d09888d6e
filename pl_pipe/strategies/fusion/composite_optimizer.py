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

from pl_pipe.errors import FusionError
from pl_pipe.strategies.fusion.replayed_optimizers import ReplayedOptimizers
from pl_pipe.tensors.lineage import version


class CompositeOptimizer(Optimizer):
    """Shows the parameter groups of all; a step is a step of each that is still trained."""

    def __init__(self, optimizers: Sequence[Sequence[Optimizer]], scaler: GradScaler | None) -> None:
        self.each = [list(own) for own in optimizers]
        """Of each variant: one, or several that it steps itself."""
        self.own = [own[0] for own in self.each]
        self.scalers = [copy.deepcopy(scaler) if scaler is not None else None for _ in optimizers]
        self.active = list(range(len(self.own)))
        """Places of the variants that are still trained."""
        self.replayed: ReplayedOptimizers | None = None
        """Steps of all at once, where gradients are those of a replay."""
        super().__init__([{"params": [torch.zeros(0, requires_grad=True)]}], {})
        self._show()

    @override
    def step(self, closure: Callable[[], Any] | None = None, losses: Sequence[Any] = ()) -> Any:
        """`losses` are the variants', by place: what their optimizers' own closures give."""
        out = None if closure is None else closure()
        if self.replayed is not None and self.replayed.step():
            return out
        for place in self.active:
            scaler = self.scalers[place]
            if scaler is None:
                self._step(self.own[place], losses[place] if losses else None)
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

    def divide(self, count: int) -> None:
        """Only the first variants' are there."""
        del self.each[count:], self.own[count:], self.scalers[count:]

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

    def _step(self, own: Optimizer, loss: Any) -> None:
        if type(own).__module__.startswith("torch.optim."):  # these do nothing with a loss
            own.step()
        else:
            own.step(closure=_Closure(own, loss))

    def _show(self) -> None:
        shown = [one for place in self.active for one in self.each[place]]
        self.param_groups = [group for one in shown for group in one.param_groups]

    def _has_gradients(self, place: int) -> bool:
        return any(one.grad is not None for group in self.own[place].param_groups for one in group["params"])


class _Closure:
    """Gives the loss of the step, whose gradients are there already; so it is to be called once, and first."""

    def __init__(self, optimizer: Optimizer, loss: Any) -> None:
        self._name = type(optimizer).__name__
        self._loss = loss
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._versions: list[int] | None = [version(one) for one in self._parameters]

    def __call__(self) -> Any:
        if self._versions is None or self._versions != [version(one) for one in self._parameters]:
            why = "again" if self._versions is None else "after it has changed parameters"
            raise FusionError(
                f"{self._name} evaluates the step {why}, which fused variants cannot within one update; override "
                "optimizer_step in the model (`def optimizer_step(self, *args): super().optimizer_step(*args)`), for "
                "which they are trained one after another"
            )
        self._versions = None
        return self._loss


def _device(optimizer: Optimizer) -> torch.device:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.device
