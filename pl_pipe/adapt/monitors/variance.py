"""How much the ranks' gradients differ. LocalGradients -> *GradientVariance* -> loggers, policies."""

from typing import Any

import lightning as L
import torch
from typing_extensions import override

from pl_pipe.adapt.monitors.base import Monitor, require_whole_gradients
from pl_pipe.adapt.monitors.local_gradients import LocalGradients, added_up, share_of_squares
from pl_pipe.errors import ConfigError


class GradientVariance(Monitor):
    """Logs `gradient_variance`: the variances of all elements among the ranks, added up.

    That sum is mean |g|² - |mean g|², so that lengths suffice: two numbers are sent around. `elementwise` is
    KungFu's number, for which all squares are sent around: the length of each parameter's variances, added up.
    """

    def __init__(self, *, interval: int = 1, elementwise: bool = False) -> None:
        super().__init__(interval=interval)
        self.elementwise = elementwise

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_whole_gradients(self, trainer)
        if trainer.world_size == 1:
            raise ConfigError(
                "GradientVariance compares the gradients of several ranks, and there is one; set trainer.devices=2 or "
                "more, or remove it"
            )
        self._gradients = LocalGradients(pl_module, keep=self.elementwise)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.is_due(trainer):
            self._gradients.listen()

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not (self.is_step(trainer) and self.is_due(trainer)):
            return
        found = self._lengths(trainer) if self.elementwise else self._trace(trainer)
        self._gradients.rest()
        self.report(trainer, {"gradient_variance": max(found, 0.0)})  # in this order NaN stays what it is

    def _trace(self, trainer: L.Trainer) -> float:
        whole = share_of_squares(self._gradients.parameters, trainer.global_rank, trainer.world_size)
        lengths = added_up(self._gradients.squared.values()), whole * trainer.world_size
        own = torch.stack([one.to(trainer.strategy.root_device) for one in lengths])  # of no gradients, on the CPU
        squares, of_mean = trainer.strategy.reduce(own, reduce_op="mean").tolist()
        return float(squares - of_mean)

    def _lengths(self, trainer: L.Trainer) -> float:
        total = 0.0
        for name, parameter in self._gradients.parameters:
            if parameter.grad is not None:
                own = self._gradients.squares.pop(name, torch.zeros_like(parameter))
                mean = trainer.strategy.reduce(own, reduce_op="mean")
                total += float(torch.linalg.vector_norm(mean - parameter.grad.detach().square()))
        return total

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._gradients.rest()

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_gradients"):
            self._gradients.rest()
