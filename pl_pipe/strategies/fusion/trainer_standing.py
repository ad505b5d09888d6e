"""Where a trainer stands in an array's training. trainer -> *standing* -> there again, for another array or fit.

A trainer has one fit loop, and some callbacks decide by what they have seen. Where arrays are trained one after
another, each meets both as if it were the only one: fresh ones in a first fit, in another what it left itself.
"""

import copy
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from pl_pipe.profiling.preserve import RandomState

_LAST = "last_model_path"
_PROGRESS = (
    ("epoch_progress",),
    ("epoch_loop", "batch_progress"),
    ("epoch_loop", "scheduler_progress"),
    ("epoch_loop", "_batches_that_stepped"),
    ("epoch_loop", "automatic_optimization", "optim_progress"),
    ("epoch_loop", "manual_optimization", "optim_step_progress"),
    ("epoch_loop", "val_loop", "batch_progress"),
)
"""Of a fit loop: what it has done."""


class Standing:
    """Loops' progress, callbacks and random numbers, as they were when this was made."""

    def __init__(self, trainer: Any) -> None:
        self.random = RandomState()
        self._progress = [(path, copy.deepcopy(_found(trainer.fit_loop, path))) for path in _PROGRESS]
        self._callbacks = [
            (callback, {name: _copy(value) for name, value in vars(callback).items()})
            for callback in trainer.callbacks
            if isinstance(callback, EarlyStopping | Checkpoint | Timer)
        ]

    def put_back(self, trainer: Any, *, anew: bool = False) -> None:
        """Loops and callbacks, but for how long is to be trained, which may have been changed; `anew` for loops that
        have done nothing."""
        before = trainer.fit_loop
        trainer.fit_loop = _FitLoop(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
        steps = before.epoch_loop
        trainer.fit_loop.epoch_loop = _TrainingEpochLoop(trainer, min_steps=steps.min_steps, max_steps=steps.max_steps)
        for path, value in () if anew else self._progress:
            setattr(_found(trainer.fit_loop, path[:-1]), path[-1], copy.deepcopy(value))
        trainer.should_stop = False
        for callback, attributes in self._callbacks:
            kept = {_LAST: getattr(callback, _LAST)} if isinstance(callback, ModelCheckpoint) else {}
            vars(callback).clear()
            vars(callback).update({name: _copy(value) for name, value in attributes.items()} | kept)


def _found(loop: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        loop = getattr(loop, name)
    return loop


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value
