"""Variants that are trained one after another within the batch. Lightning's loop -> *loops* -> each variant's own.

For modules that run backward or optimizers themselves, and optimizers that evaluate a step several times: each variant
has an optimization loop of Lightning's for itself, which counts its steps, and meanwhile the trainer's module,
optimizers and schedulers are its own. So it does what it would do alone.
"""

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from pl_pipe.strategies.fusion.step_formulation import TRAINING, SharedBatches
from pl_pipe.strategies.fusion.variant_hooks import overrides
from pl_pipe.strategies.fusion.variant_names import mean_loss

if TYPE_CHECKING:
    from pl_pipe.strategies.fusion.fused_variants import FusedVariants

IN_TURNS = "in turns"
_PROGRESS = {"manual_optimization": "optim_step_progress", "automatic_optimization": "optim_progress"}


def why_in_turns(module: L.LightningModule) -> str | None:
    """What of a module leaves Lightning no step that could be computed for all variants at once."""
    if not module.automatic_optimization:
        return "automatic_optimization is False, so that the step runs backward and optimizers itself"
    hook = next((hook for hook in ("backward", "optimizer_step") if overrides(module, hook)), None)
    return None if hook is None else f"{hook} is overridden"


def why_of_optimizer(optimizer: Any) -> str | None:
    return "LBFGS evaluates the step several times for an update" if isinstance(optimizer, torch.optim.LBFGS) else None


class VariantLoops:
    def __init__(self, strategy: "FusedVariants", trainer: Any) -> None:
        assert strategy.training is not None
        self._strategy = strategy
        self._training = strategy.training
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        is_automatic = self._training.speaker.automatic_optimization
        self._name = "automatic_optimization" if is_automatic else "manual_optimization"
        self._plain = getattr(self._epoch_loop, self._name)
        self._own = [type(self._plain)(trainer) for _ in self._training.variants]
        for loop in self._own:
            self._put_progress(loop, self._plain)
        self._batches = SharedBatches()
        self._own_fx: list[str | None] = [None] * len(self._own)
        """The hook in which each has logged last, by which Lightning goes."""
        self._left_fx: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block, Lightning's loop runs those of the variants."""
        turns = self._training.members.turns
        vars(self._plain)["run"], turns.around = self._run, self._turn
        try:
            yield
        finally:
            vars(self._plain).pop("run")
            turns.around = None

    @contextmanager
    def counting(self, place: int) -> Iterator[None]:
        """Within the block the trainer's steps are this variant's."""
        setattr(self._epoch_loop, self._name, self._own[place])
        try:
            yield
        finally:
            setattr(self._epoch_loop, self._name, self._plain)

    def load(self, place: int, checkpoint: Mapping[str, Any]) -> None:
        """How far this variant has come."""
        name = _PROGRESS[self._name]
        state = checkpoint["loops"]["fit_loop"][f"epoch_loop.{self._name}.{name}"]
        getattr(self._own[place], name).load_state_dict(state)

    def _run(self, *args: Any) -> dict[str, Any]:
        """What Lightning's loop is called with: for automatic optimization the optimizer and the batch's number, then
        the step's arguments."""
        *_, given = args
        training, results = self._training, {}
        python, numpy = random.getstate(), np.random.get_state()
        with training.members.streams.joined():
            for turn, place in enumerate(list(training.active)):
                if turn:
                    random.setstate(python)  # each draws as it would alone
                    np.random.set_state(numpy)
                own = (
                    dict(zip(given, self._batches.own(tuple(given.values())), strict=True)) if self._are_many else given
                )
                with training.members.turns.turn(turn):
                    results[place] = self._run_own(place, args[1:-1], own)
                self._batches.check(TRAINING)
        training.hooks.outputs = [results.get(place, {}) for place in range(len(training.variants))]
        self._put_progress(self._plain, max((self._own[place] for place in training.active), key=self._steps))
        loss = mean_loss([result.get("loss") for result in results.values()])
        return {} if loss is None else {"loss": loss}

    def _run_own(self, place: int, batch_number: Any, given: Any) -> dict[str, Any]:
        loop, optimizer = self._own[place], ()
        if self._name == "automatic_optimization":
            optimizer = self._trainer.optimizers
            if self._epoch_loop.batch_progress.current.ready == 1:
                loop.optim_progress.reset_on_run()  # as Lightning does with its own
        found: dict[str, Any] = loop.run(*optimizer, *batch_number, given)
        return found

    @contextmanager
    def _turn(self, turn: int) -> Iterator[None]:
        """Around whatever a variant's own Python does."""
        strategy, training, connector = self._strategy, self._training, self._trainer._logger_connector
        place = training.active[turn]
        if connector._current_fx != self._left_fx:  # a callback has logged, or an epoch begun
            self._own_fx = [connector._current_fx] * len(self._own)
        connector._current_fx = self._own_fx[place]
        before, plugin = (strategy._lightning_module, strategy.model), strategy.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        strategy._lightning_module = strategy.model = training.variants[place].module
        if isinstance(plugin, MixedPrecision) and training.composite is not None:
            plugin.scaler = training.composite.scalers[place]
        try:
            with training.hooks.silent(), self.counting(place):
                yield
        finally:
            strategy._lightning_module, strategy.model = before
            if isinstance(plugin, MixedPrecision):
                plugin.scaler = scaler
            self._left_fx = self._own_fx[place] = connector._current_fx

    @property
    def _are_many(self) -> bool:
        return len(self._training.active) > 1

    def _put_progress(self, loop: Any, other: Any) -> None:
        name = _PROGRESS[self._name]
        setattr(loop, name, copy.deepcopy(getattr(other, name)))

    def _steps(self, loop: Any) -> int:
        progress = getattr(loop, _PROGRESS[self._name])
        return int(progress.optimizer_steps if self._name == "automatic_optimization" else progress.total.completed)
