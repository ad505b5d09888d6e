"""The gradient noise scale while training runs. LocalGradients -> *GradientNoiseScale* -> loggers, policies."""

from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor
from typing_extensions import override

from pl_pipe.adapt.estimates import NoiseScale
from pl_pipe.adapt.monitors.base import Monitor, require_whole_gradients, samples_of
from pl_pipe.adapt.monitors.local_gradients import LocalGradients, added_up, share_of_squares, squared_length


class GradientNoiseScale(Monitor):
    """Logs `noise_scale`, in samples. Three numbers are sent around a measured step.

    With one rank there are no two gradients to compare; there, those of successive steps are, which needs the memory of
    one more gradient.
    """

    def __init__(self, *, interval: int = 1, keep: float = 0.95, warmup: int = 10) -> None:
        """
        Args:
            keep: how much of its averages the estimate keeps from one measurement to the next.
            warmup: measurements before there is an answer.
        """
        super().__init__(interval=interval)
        self.estimate = NoiseScale(keep, warmup)
        self._is_resumed = False
        self._samples = 0
        self._within_step = False
        """Batches have been accumulated, and more will be before the step is made."""
        self._previous: dict[str, Tensor] = {}
        self._previous_samples = 0

    @property
    def noise_scale(self) -> float:
        return self.estimate.value

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_whole_gradients(self, trainer)
        self._gradients = LocalGradients(pl_module)
        if not self._is_resumed:
            self.estimate = NoiseScale(self.estimate.keep, self.estimate.warmup)  # it may be another model
        self._is_resumed = False

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.estimate.state()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.estimate.load(state_dict)
        self._is_resumed = True

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        before = self._samples if self._within_step else 0
        self._samples = before + samples_of(batch, self)
        self._within_step = True
        if self.is_due(trainer) and trainer.world_size > 1:
            self._gradients.listen()

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.is_step(trainer):
            return
        self._within_step = False
        if not self.is_due(trainer):
            if trainer.world_size == 1 and (trainer.global_step + 1) % self.interval == 0:
                self._keep_for_next_step()
            return
        if trainer.world_size > 1:
            self._compare_ranks(trainer)
        else:
            self._compare_steps()
        self._gradients.rest()
        values = {"noise_scale": self.estimate.value, "gradient_signal": self.estimate.signal}
        self.report(trainer, {**values, "gradient_noise": self.estimate.noise})

    def _compare_ranks(self, trainer: L.Trainer) -> None:
        """By numbers that all ranks have alike, to the last bit: policies decide by them."""
        whole = share_of_squares(self._gradients.parameters, trainer.global_rank, trainer.world_size)
        lengths = [added_up(self._gradients.squared.values()), whole * trainer.world_size]
        share = torch.tensor(1 / self._samples, dtype=torch.float64)  # noise goes with these, so they are averaged
        own = torch.stack([one.to(trainer.strategy.root_device) for one in (*lengths, share)])
        small_squared, large_squared, share_mean = trainer.strategy.reduce(own, reduce_op="mean").tolist()
        self.estimate.add(small_squared, large_squared, small=1 / share_mean, large=trainer.world_size / share_mean)

    def _compare_steps(self) -> None:
        """The gradients of this step and the last, as those of two ranks."""
        before, before_samples = self._previous, self._previous_samples
        now = self._keep_for_next_step()
        if before:
            small = (_squared(now.values()) + _squared(before.values())) / 2
            both = [_mean(now.get(name), before.get(name)) for name in {**before, **now}]
            samples = 2 / (1 / self._samples + 1 / before_samples)
            self.estimate.add(small, _squared(both), small=samples, large=2 * samples)
        if self.interval > 1:
            self._previous = {}

    def _keep_for_next_step(self) -> dict[str, Tensor]:
        """By name: not every step has a gradient of every parameter."""
        parameters = self._gradients.parameters
        self._previous = {name: one.grad.detach().clone() for name, one in parameters if one.grad is not None}
        self._previous_samples = self._samples
        return self._previous

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._gradients.rest()
        self._previous = {}

    @override
    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_gradients"):
            self._gradients.rest()


def _mean(one: Tensor | None, other: Tensor | None) -> Tensor:
    """None is a gradient of zeros."""
    if one is None or other is None:
        given = one if one is not None else other
        assert given is not None
        return given / 2
    return (one + other) / 2


def _squared(tensors: Iterable[Tensor]) -> float:
    return float(added_up(squared_length(one) for one in tensors))
