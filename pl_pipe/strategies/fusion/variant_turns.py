"""Whose turn it is among the variants: random numbers, optimizers and schedulers are its own. steps, hooks -> *turns*.

The trainer has one optimizer for Lightning's loop, with the parameter groups of all. A variant's Python that asks the
trainer for it means its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.tensors.arrays import FollowedStreams
from pl_pipe.tensors.operations import user_line

log = get_logger(__name__)

_NAMES = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
"""Of Lightning's strategies; `trainer.optimizers` and `trainer.lr_scheduler_configs` are these."""


class Nobody:
    """One module's Python runs for all variants."""


NOBODY = Nobody()


class VariantTurns:
    """Turns are numbered by place among the variants that have not left."""

    def __init__(self, streams: FollowedStreams) -> None:
        self.streams = streams
        self.taken = 0
        """How often a variant's own Python has run; it may have set something that differs now."""
        self.whose: int | Nobody | None = None
        """The place of the variant whose Python runs; None while Lightning's or a callback's does."""
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
        self.taken += 1
        stops = self._stops()
        with self.streams.turn(place), self._shown(self._own[place] if self._own else {}), self._said(place):
            yield
        if self._stops() and not stops:
            self._tell_who_stops(place)

    def _stops(self) -> bool:
        trainer = None if self._strategy is None else self._strategy.training.speaker._trainer
        return trainer is not None and bool(trainer.should_stop)

    def _tell_who_stops(self, place: int) -> None:
        training = self._strategy.training
        if len(training.active) > 1:
            log.warning(
                "variant %d sets trainer.should_stop, which ends the training of all variants; let it leave alone by "
                "trainer.strategy.stop_variants([number]) in a callback, or by VariantEarlyStopping",
                training.variants[training.active[place]].number,
            )

    @contextmanager
    def nobodys(self) -> Iterator[None]:
        """One module's Python runs for all: it is told that there is no optimizer that it could mean."""
        with self._shown({name: _NotTold(name) for name in _NAMES} if self._own else {}), self._said(NOBODY):
            yield

    @contextmanager
    def _said(self, whose: int | Nobody) -> Iterator[None]:
        before, self.whose = self.whose, whose
        try:
            yield
        finally:
            self.whose = before

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
