"""Keeps a pipeline's ranks in step at the points where Lightning takes decisions.

The last stage (rank 0) has the metrics. The others are told them when the pipeline is drained, before callbacks, early
stopping, checkpoints and plateau schedulers look, and again after the module's own hooks, which may log.
"""

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from typing_extensions import override

from pl_pipe.strategies.pipeline.ranks import check_same_lengths, share_metrics

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_EPOCH_END, _FIND = "on_train_epoch_end", "lr_find"


class PipelineCallback(L.Callback):
    """Goes first among the trainer's callbacks."""

    def __init__(self, strategy: "PipeDreamStrategy") -> None:
        self._strategy = strategy
        self._on_trial = False

    def attach(self, trainer: Any, module: L.LightningModule) -> None:
        trainer.callbacks.insert(0, self)
        plain = getattr(module, _EPOCH_END)
        self._own = vars(module).get(_EPOCH_END)

        def then_share() -> Any:  # monitoring callbacks come after the module's hook, which may log
            answer = plain()
            share_metrics(trainer)
            return answer

        vars(module)[_EPOCH_END] = then_share
        run = trainer.fit_loop.run

        def tried_or_run() -> None:
            """The learning-rate finder runs the loop with callbacks of its own; afterwards training begins."""
            if self in trainer.callbacks:
                run()
                return
            self._on_trial = True
            trainer.callbacks.append(self)
            try:
                run()
            finally:
                trainer.callbacks.remove(self)
                self._on_trial = False
            self._strategy.stop.forget()

        trainer.fit_loop.run = tried_or_run
        self._finders = [one for one in trainer.callbacks if isinstance(one, LearningRateFinder)]
        for finder in self._finders:
            vars(finder)[_FIND] = self._without_drawing(getattr(finder, _FIND))

    def _without_drawing(self, find: Callable[..., None]) -> Callable[..., None]:
        """Lightning undoes what its search drew; here that has been drawn from the stream of the loaders."""

        def found(*args: Any, **kwargs: Any) -> None:
            before = copy.deepcopy(self._strategy.loading)
            try:
                find(*args, **kwargs)
            finally:
                vars(self._strategy.loading).update(vars(before))

        return found

    def detach(self, trainer: Any, module: L.LightningModule) -> None:
        if self in trainer.callbacks:
            trainer.callbacks.remove(self)
        vars(trainer.fit_loop).pop("run", None)
        for finder in self._finders:
            vars(finder).pop(_FIND, None)
        vars(module).pop(_EPOCH_END, None)
        if self._own is not None:
            vars(module)[_EPOCH_END] = self._own

    @override
    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._loading_before = copy.deepcopy(self._strategy.loading)

    @override
    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lightning undoes what the sanity check drew; here that has been drawn from the stream of the loaders."""
        vars(self._strategy.loading).update(vars(self._loading_before))

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._strategy.compare_data_anew()
        check_same_lengths("training", trainer.num_training_batches)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._strategy.compare_data_anew()
        with torch.inference_mode(False), torch.enable_grad():
            self._strategy.drain()  # a callback that stops training after a batch has Lightning validate at once
        check_same_lengths("validation", trainer.num_val_batches)

    @override
    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_same_lengths("test", trainer.num_test_batches)

    @override
    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_same_lengths("prediction", trainer.num_predict_batches)

    @override
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Further callbacks and the module may change the batch by chance: as `on_after_batch_transfer` may, alike."""
        self._strategy.batch_hooks.enter_context(self._strategy.hooks_alike)

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._strategy.stop.batch_is_ending()
        if any(_saves_now(callback, trainer) for callback in trainer.checkpoint_callbacks):
            self._strategy.drain()
            share_metrics(trainer)

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._strategy.drain()  # an epoch that was stopped early has batches in flight
        share_metrics(trainer)  # for callbacks that come before the module's hook

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Other hooks at this point may do what they like with the model, on one rank alone as well."""
        self._strategy.drain()
        if not self._on_trial:
            self._strategy.become_whole()

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        share_metrics(trainer)

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        share_metrics(trainer)

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        share_metrics(trainer)
        self._strategy.stop.has_validated()

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        share_metrics(trainer)


def _saves_now(callback: Any, trainer: L.Trainer) -> bool:
    """Whether a ModelCheckpoint will look at the metrics after this batch."""
    if not isinstance(callback, ModelCheckpoint):
        return False
    every = callback._every_n_train_steps
    if every < 1 or trainer.global_step % every:
        return False
    return not callback._should_skip_saving_checkpoint(trainer)  # batches that accumulate stay at a step that is saved
