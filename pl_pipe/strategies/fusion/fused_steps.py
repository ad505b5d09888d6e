"""Lightning's hooks of a step, for all variants at once. trainer's loop -> *steps* -> VariantTraining.

training_step    every variant's loss and gradients, by the quickest formulation
optimizer_step   every variant's clipping, scaling and own optimizer
validation_step, test_step, predict_step   every variant's own
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer import call
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from pl_pipe.strategies.fusion.composite_optimizer import CompositeOptimizer
from pl_pipe.strategies.fusion.step_formulation import TRAINING
from pl_pipe.strategies.fusion.variant_hooks import overrides
from pl_pipe.strategies.fusion.variant_names import mean_loss
from pl_pipe.strategies.fusion.variant_training import VariantTraining

_BETWEEN = (
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("configure_gradient_clipping", "optimizer_zero_grad"),
)
"""Hooks between a step's backward and its update."""


class FusedSteps(Strategy):
    _averages_gradients = False
    _largest: Callable[[Sequence[float]], list[float]] | None = None
    """Of every number, the largest among ranks; there is one."""
    training: VariantTraining | None = None
    """The variants that are being trained together, while a trainer runs."""
    _is_unseen: bool | None = None
    """Whether nobody looks at gradients before the optimizers do; None until it is asked."""

    @property
    def composite(self) -> CompositeOptimizer:
        assert self.training is not None
        assert self.training.composite is not None
        return self.training.composite

    @property
    def _is_turn(self) -> bool:
        """Of variants that are trained one after another, one is just now."""
        training = self.training
        return training is not None and training.loops is not None and isinstance(training.members.turns.whose, int)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        assert training is not None
        if self._is_turn:
            return super().training_step(*args, **kwargs)
        trainer = training.speaker.trainer
        every = trainer.accumulate_grad_batches
        is_first = trainer.fit_loop.epoch_loop.batch_idx % every == 0
        updates = every == 1 and self._nothing_is_between(trainer)
        if is_first and not (updates and training.leaves_gradients):
            self._zero_gradients(trainer)
        outs = training.run(
            TRAINING,
            args,
            kwargs,
            context=self.precision_plugin.train_step_context,
            share=1.0 / every,
            adds=every > 1,
            updates=updates,
            clear_gradients=self.composite.zero_grad if is_first else None,
        )
        return self._one_output(outs)

    def _nothing_is_between(self, trainer: Any) -> bool:
        """Whether nobody looks at gradients before the optimizers do."""
        if self._is_unseen is None:
            module = self.training.speaker  # type: ignore[union-attr]
            self._is_unseen = (
                not trainer.gradient_clip_val
                and not self._averages_gradients
                and not any(overrides(module, hook) for hook in _BETWEEN)
                and not any(
                    hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(L.Callback, hook)
                    for callback in trainer.callbacks
                    for hook in _BETWEEN
                    if hasattr(L.Callback, hook)
                )
            )
        return self._is_unseen

    def _zero_gradients(self, trainer: L.Trainer) -> None:
        """As each variant's module does it; Lightning's own call comes after the backward here, and is too late."""
        training = self.training
        assert training is not None
        for place in training.active:
            module = training.variants[place].module
            optimizer = self.composite.own[place]
            type(module).optimizer_zero_grad(
                module, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, optimizer
            )

    def _one_output(self, outs: Sequence[Any]) -> Any:
        """For Lightning and its callbacks: one loss that tells of all, and what else the first returned."""
        training = self.training
        assert training is not None
        losses = [out.get("loss") if isinstance(out, Mapping) else out for out in outs]
        every = training.speaker.trainer.accumulate_grad_batches
        for place, loss, out in zip(training.active, losses, outs, strict=True):
            shown = loss if loss is None or every == 1 else loss / every  # as Lightning's hooks are given it
            training.hooks.losses[place] = shown
            extra = out if isinstance(out, Mapping) else {}
            training.hooks.outputs[place] = {} if out is None else {**extra, "loss": shown}
        known = training.replayed_mean_loss
        loss = mean_loss(losses) if known is None else known
        return loss if loss is None or not isinstance(outs[0], Mapping) else {**outs[0], "loss": loss}

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Gradients are there already; what remains is to say so."""
        if self._is_turn:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.training is not None
        trainer = self.training.speaker.trainer
        for hook in ("on_before_backward", "on_after_backward"):
            given = (closure_loss,) if hook == "on_before_backward" else ()
            call._call_callback_hooks(trainer, hook, *given)
            call._call_lightning_module_hook(trainer, hook, *given)
        return closure_loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        if self._is_turn:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        speaker = self.lightning_module
        assert speaker is not None
        result = closure()
        self._average_gradients()
        self.composite.unscale()
        self.precision_plugin._after_closure(speaker, optimizer)
        assert self.training is not None
        self.composite.step(losses=self.training.hooks.losses)
        return result

    def _average_gradients(self) -> None:
        """Over devices; there is one."""

    # ---- evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """What the first variant's returned, for callbacks; each variant's hooks get its own."""
        return self._evaluated("validation_step", args, kwargs)[0]

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluated("test_step", args, kwargs)[0]

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Each variant's predictions, by its name."""
        outs = self._evaluated("predict_step", args, kwargs)
        assert self.training is not None
        numbers = [self.training.variants[place].number for place in self.training.active]
        return {f"variant_{number}": out for number, out in zip(numbers, outs, strict=True)}

    def _evaluated(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        training = self.training
        assert training is not None
        contexts = {
            "validation_step": self.precision_plugin.val_step_context,
            "test_step": self.precision_plugin.test_step_context,
            "predict_step": self.precision_plugin.predict_step_context,
        }
        return training.run(hook, args, kwargs, context=contexts[hook])
