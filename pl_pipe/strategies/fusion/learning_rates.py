"""Learning rates under their variants' names. LearningRateMonitor -> *named* -> `lr-SGD/variant_3`.

Lightning's monitor would number the parameter groups of the one optimizer that it sees by place: another variant's once
some have left, and a second time those that schedulers have told already.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import LearningRateMonitor
from torch.optim import Optimizer

from pl_pipe.strategies.fusion.variant_optimizers import names_of
from pl_pipe.strategies.fusion.variant_training import VariantTraining

_FIND = "_find_names_from_optimizers"


@contextmanager
def rates_of_variants(trainer: Any, training: VariantTraining) -> Iterator[None]:
    """Within the block, monitors of the trainer find each variant's own optimizer."""
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, LearningRateMonitor)]
    for monitor in monitors:
        vars(monitor)[_FIND] = partial(_names, monitor, training)
    try:
        yield
    finally:
        for monitor in monitors:
            vars(monitor).pop(_FIND, None)


def _names(
    monitor: LearningRateMonitor,
    training: VariantTraining,
    optimizers: Sequence[Any],  # noqa: ARG001
    seen_optimizers: Sequence[Optimizer],
    seen_optimizer_types: Any,  # noqa: ARG001
) -> tuple[list[list[str]], list[Optimizer]]:
    """Of the active variants' optimizers that no scheduler has: a name for each parameter group."""
    assert training.composite is not None
    own = [
        (f"{name}/variant_{training.variants[place].number}", one)
        for place in training.active
        for name, one in zip(names_of(training.composite.each[place]), training.composite.each[place], strict=True)
    ]
    unseen = [(name, one) for name, one in own if not any(one is seen for seen in seen_optimizers)]
    names = [
        [monitor._add_suffix(name, one.param_groups, group) for group in range(len(one.param_groups))]
        for name, one in unseen
    ]
    return names, [one for _, one in unseen]
