"""Parts of Lightning that would see one stage or draw on one rank only, led through the pipeline.

module's hooks on a batch    draw from the stream of the loaders, so that every stage sees the same augmentation
self.optimizers()            in a step that is only planned with: they are made for it, and again for the run
ModelSummary                 runs the module's example before the model is divided, and shows the whole
BasePredictionWriter         writes where the predictions are
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_BATCH_HOOK = "_call_batch_hook"
_SUMMARY = "_summary"
_WRITING = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def batch_hooks_alike(strategy: "PipeDreamStrategy", module: L.LightningModule) -> Iterator[None]:
    """Within the block, hooks such as `on_after_batch_transfer` draw the same numbers on every rank.

    All of them are called by one method of the module, which is replaced. A GPU's generator is none of the stream's:
    the hooks have one of their own, which starts as rank 0's stood.
    """
    plain: Callable[..., Any] = getattr(module, _BATCH_HOOK)
    device = strategy.root_device
    on_device = strategy.broadcast(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None

    def alike(*args: Any, **kwargs: Any) -> Any:
        nonlocal on_device
        if on_device is None:
            with strategy.loading:
                return plain(*args, **kwargs)
        models = torch.cuda.get_rng_state(device)
        torch.cuda.set_rng_state(on_device, device)
        try:
            with strategy.loading:
                return plain(*args, **kwargs)
        finally:
            on_device = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(models, device)

    vars(module)[_BATCH_HOOK] = alike
    try:
        yield
    finally:
        vars(module).pop(_BATCH_HOOK, None)


@contextmanager
def optimizers_on_demand(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Within the block, which comes before the run's optimizers, `self.optimizers()` and `self.lr_schedulers()` answer.

    A step that logs its learning rate asks them. They are made from the whole model when the first one does.
    """
    strategy = trainer.strategy

    def answering(plain: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not strategy.optimizers:
                strategy.setup_optimizers(trainer)
            return plain(*args, **kwargs)

        return answer

    names = ("optimizers", "lr_schedulers")
    vars(module).update({name: answering(getattr(module, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        strategy.optimizers, strategy.lr_scheduler_configs = [], []


def whole_summaries(trainer: Any) -> dict[ModelSummary, Any]:
    """What each ModelSummary will show, while this rank still has the whole model to run the example with."""
    if trainer.world_size == 1 or trainer.lightning_module.example_input_array is None:
        return {}  # what is counted without running anything is right on a divided model too
    callbacks = [
        callback for callback in trainer.callbacks if isinstance(callback, ModelSummary) and callback._max_depth
    ]
    return {callback: callback._summary(trainer, trainer.lightning_module) for callback in callbacks}


@contextmanager
def showing(summaries: dict[ModelSummary, Any]) -> Iterator[None]:
    """Within the block, these are shown instead of new ones."""
    for callback, summary in summaries.items():
        vars(callback)[_SUMMARY] = lambda *_, summary=summary: summary
    try:
        yield
    finally:
        for callback in summaries:
            vars(callback).pop(_SUMMARY, None)


@contextmanager
def nothing_written(trainer: Any) -> Iterator[None]:
    """Within the block, on a rank without predictions, no writer of them is called: it would be handed None."""
    writers = [callback for callback in trainer.callbacks if isinstance(callback, BasePredictionWriter)]
    for writer in writers:
        vars(writer).update(dict.fromkeys(_WRITING, lambda *_, **__: None))
    try:
        yield
    finally:
        for writer in writers:
            for name in _WRITING:
                vars(writer).pop(name, None)
