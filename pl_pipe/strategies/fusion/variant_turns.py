"""Whose turn it is among the variants: random numbers, optimizers and schedulers are its own. steps, hooks -> *turns*.

The trainer has one optimizer for Lightning's loop, with the parameter groups of all. A variant's Python that asks the
trainer for it means its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays import FollowedStreams
from pl_pipe.tensors.operations import user_line

_NAMES = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
"""Of Lightning's strategies; `trainer.optimizers` and `trainer.lr_scheduler_configs` are these."""


class VariantTurns:
    """Turns are numbered by place among the variants that have not left."""

    def __init__(self, streams: FollowedStreams) -> None:
        self.streams = streams
        self._strategy: Any = None
        self._own: list[dict[str, Any]] = []

    def give(self, strategy: Any, optimizers: Sequence[Any], configs: Sequence[Any]) -> None:
        """From now on those of each variant; what the strategy itself has is Lightning's between turns."""
        self._strategy = strategy
        self._own = [
            dict(zip(_NAMES, ([one], [LightningOptimizer._to_lightning_optimizer(one, strategy)], of_one), strict=True))
            for one, of_one in zip(optimizers, configs, strict=True)
        ]

    def keep(self, turns: Sequence[int]) -> None:
        """Only these variants are still there; the streams are kept by who made them."""
        if self._own:
            self._own = [self._own[turn] for turn in turns]

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        with self.streams.turn(place), self._shown(self._own[place] if self._own else {}):
            yield

    @contextmanager
    def nobodys(self) -> Iterator[None]:
        """One module's Python runs for all: it is told that there is no optimizer that it could mean."""
        with self._shown({name: _NotTold(name) for name in _NAMES} if self._own else {}):
            yield

    @contextmanager
    def _shown(self, values: dict[str, Any]) -> Iterator[None]:
        if not values:
            yield
            return
        stored = vars(self._strategy)
        before = {name: stored[name] for name in values}
        stored.update(values)
        try:
            yield
        finally:
            for name, value in values.items():
                if stored[name] is value:  # else someone has let variants go meanwhile
                    stored[name] = before[name]


class _NotTold(list[Any]):
    """In place of a list that must not be read."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name.strip("_")

    def _refuse(self, *_: Any) -> Any:
        raise FusionError(
            f"{user_line()}: the step reads trainer.{self._name}, which is each variant's own, but runs once for all"
        )

    __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = _refuse
