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
    own = [(training.variants[place].number, training.composite.own[place]) for place in training.active]
    unseen = [(number, one) for number, one in own if not any(one is seen for seen in seen_optimizers)]
    names = [
        [
            monitor._add_suffix(f"lr-{type(one).__name__}/variant_{number}", one.param_groups, group)
            for group in range(len(one.param_groups))
        ]
        for number, one in unseen
    ]
    return names, [one for _, one in unseen]
