"""Whose turn it is among the variants: random numbers, optimizers and schedulers are its own. steps, hooks -> *turns*.

The trainer has one optimizer for Lightning's loop, with the parameter groups of all. A variant's Python that asks the
trainer for it means its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
from lightning.pytorch.core.optimizer import LightningOptimizer

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.tensors.arrays import FollowedStreams
from pl_pipe.tensors.operations import user_line

log = get_logger(__name__)

_NAMES = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
"""Of Lightning's strategies; `trainer.optimizers` and `trainer.lr_scheduler_configs` are these."""
_MODEL = "_model"
"""`trainer.model`."""


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
        self.around: Callable[[int], AbstractContextManager[None]] | None = None
        """What else a turn needs."""
        self._strategy: Any = None
        self._own: list[dict[str, Any]] = []

    def give(
        self,
        strategy: Any,
        modules: Sequence[L.LightningModule],
        optimizers: Sequence[list[LightningOptimizer]],
        configs: Sequence[Any],
    ) -> None:
        """From now on those of each variant; what the strategy itself has is Lightning's between turns."""
        self._strategy = strategy
        self._own = [
            {**dict(zip(_NAMES, ([one.optimizer for one in own], own, of_one), strict=True)), _MODEL: module}
            for module, own, of_one in zip(modules, optimizers, configs, strict=True)
        ]

    def keep(self, turns: Sequence[int]) -> None:
        """Only these variants are still there; the streams are kept by who made them."""
        if self._own:
            self._own = [self._own[turn] for turn in turns]

    def close(self) -> None:
        """The run is over: nobody has a turn any more."""
        self._strategy, self._own = None, []

    @contextmanager
    def turn(self, place: int) -> Iterator[None]:
        self.taken += 1
        stops = self._stops()
        around = nullcontext() if self.around is None else self.around(place)
        own = dict(self._own[place]) if self._own else {}
        if self.around is not None:  # Lightning's own loop runs, which calls the variant by `trainer.lightning_module`
            own.pop(_MODEL, None)
        with self.streams.turn(place), self._shown(own), self._said(place), around:
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
        untold = {**{name: _NotTold(name) for name in _NAMES}, _MODEL: _NoModel()} if self._own else {}
        with self._shown(untold), self._said(NOBODY):
            yield

    @contextmanager
    def shows_model(self, strategy: Any, module: L.LightningModule) -> Iterator[None]:
        """Within the block, where a variant has no turn yet, `trainer.model` is this one."""
        before, strategy.model = strategy.model, module
        try:
            yield
        finally:
            strategy.model = before

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


class _NoModel:
    """In place of the model, which must not be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise FusionError(
            f"{user_line()}: the step uses trainer.model, which is each variant's own, but runs once for all"
        )


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
