"""Variants that train together, from their first hook to their last. FusionStrategy -> *training* -> formulations.

connect   hooks and logs of all modules go through the first one's
setup     one array over all, one optimizer for Lightning
step      as the trial's formulation computes it
keep      some variants leave, the others go on where they are
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torchmetrics import Metric

from pl_pipe.fusion import FollowedStreams, FusionReport, VariantArray
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.array_steps import array_of
from pl_pipe.strategies.fusion.composite_optimizer import CompositeOptimizer
from pl_pipe.strategies.fusion.formulation_trial import FormulationTrial
from pl_pipe.strategies.fusion.replayed_steps import ReplayedSteps
from pl_pipe.strategies.fusion.settings import ONE_BY_ONE, FusionSettings
from pl_pipe.strategies.fusion.step_formulation import TRAINING, Members, StepCall
from pl_pipe.strategies.fusion.step_ways import StepWays
from pl_pipe.strategies.fusion.variant_building import Variant
from pl_pipe.strategies.fusion.variant_hooks import VariantHooks, overrides
from pl_pipe.strategies.fusion.variant_log import VariantLog
from pl_pipe.strategies.fusion.variant_loops import IN_TURNS, VariantLoops
from pl_pipe.strategies.fusion.variant_optimizers import (
    forget,
    hand_over,
    own_optimizers,
    step_schedulers_as_the_variants_do,
)
from pl_pipe.strategies.fusion.variant_turns import Nobody

log = get_logger(__name__)

_OF_STEPS = ("optimizer_zero_grad", "lr_scheduler_step")
COUNTERS = ("epoch", "global_step", "loops")
"""Of a checkpoint: how far its trainer has come."""


@dataclass(frozen=True)
class FusionFacts:
    """What was fused, how, and what was not and why."""

    variants: int
    chosen: dict[str, str]
    """The formulation of each kind of step, as far as it is decided."""
    step_s: dict[str, dict[str, float]]
    """The time of a step, for each that was timed."""
    lines: list[str]
    """A table of the array's operations."""


class VariantTraining:
    def __init__(
        self,
        variants: Sequence[Variant],
        settings: FusionSettings,
        largest: Callable[[Sequence[float]], list[float]] | None = None,
    ) -> None:
        """`largest` gives the largest of every number among ranks, where there are several."""
        self.variants = list(variants)
        self.active = list(range(len(variants)))
        """Places, among `variants`, of those that have not left."""
        self.composite: CompositeOptimizer | None = None
        self.configs: list[list[LRSchedulerConfig]] = []
        """Schedulers of each variant."""
        self._settings = settings
        self._largest = largest
        modules = [variant.module for variant in variants]
        streams = FollowedStreams(
            [variant.random_state for variant in variants], [variant.follows for variant in variants]
        )
        streams.states = [variant.stream or state for variant, state in zip(variants, streams.states, strict=True)]
        self._log = VariantLog(modules, [variant.number for variant in variants])
        self.members = Members(list(modules), self._log, streams, settings.fuse_except)
        self.hooks = VariantHooks(modules, self._log, self.members.turns)
        self._trials: dict[str, FormulationTrial] = {}
        self._array: VariantArray[L.LightningModule] | None = None
        self._told = False
        self.has_users_callbacks = False
        self.loops: VariantLoops | None = None
        """Where variants are trained one after another."""
        self.left_at: dict[int, dict[str, Any]] = {}
        """By place, where a trainer that has trained this variant alone would stand."""

    @property
    def speaker(self) -> L.LightningModule:
        """The module that Lightning knows."""
        return self.variants[0].module

    @property
    def modules(self) -> list[L.LightningModule]:
        return [variant.module for variant in self.variants]

    @property
    def array(self) -> VariantArray[L.LightningModule] | None:
        return self._array

    def prepare(self, device: torch.device, *, in_turns: bool = False) -> None:
        """After the modules have their final form and place."""
        self.members.device = device
        if len(self.members.modules) > 1 and self._settings.formulation != ONE_BY_ONE and not in_turns:
            self._array = array_of(self.members, self._settings.layers)
        self._trials.clear()

    def set_up_optimizers(self, scaler: Any) -> tuple[CompositeOptimizer, list[LRSchedulerConfig]]:
        found, strategy, turns = [], self.speaker.trainer.strategy, self.members.turns
        with self.members.streams.joined():
            for place, variant in enumerate(self.variants):
                with self.members.streams.turn(place), turns.shows_model(strategy, variant.module):
                    found.append(own_optimizers(variant))
        self.members.streams.left = None  # the first may have had a loader made (for its length), which draws: for all
        lightnings = [[LightningOptimizer._to_lightning_optimizer(one, strategy) for one in own] for own, _ in found]
        for variant, own, (_, configs) in zip(self.variants, lightnings, found, strict=True):
            hand_over(variant, own, configs)
        self.configs = [configs for _, configs in found]
        self.composite = CompositeOptimizer([own for own, _ in found], scaler)
        self.hooks.optimizers = self.composite.own
        turns.give(strategy, self.modules, lightnings, self.configs)
        step_schedulers_as_the_variants_do(self.variants, self.configs)
        return self.composite, self.active_configs()

    def run_in_turns(self, loops: VariantLoops) -> None:
        """Variants are trained by these, and are no array."""
        self.loops = loops
        self._log.in_turns = True
        if self._array is not None:
            self._array.release()
            self._array = None

    @property
    def leaves_gradients(self) -> bool:
        """Whether gradients of the last training step need not be cleared before the next."""
        trial = self._trials.get(TRAINING)
        return trial is not None and isinstance(trial.chosen, ReplayedSteps) and trial.chosen.leaves_gradients

    @property
    def replayed_mean_loss(self) -> Tensor | None:
        """Of the last training step, where its graph has computed it."""
        trial = self._trials.get(TRAINING)
        chosen = None if trial is None else trial.chosen
        return chosen.mean_loss if isinstance(chosen, ReplayedSteps) else None

    def active_configs(self) -> list[LRSchedulerConfig]:
        return [config for place in self.active for config in self.configs[place]]

    def run(
        self,
        hook: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        context: Callable[[], AbstractContextManager[Any]],
        share: float = 1.0,
        adds: bool = False,
        updates: bool = False,
        clear_gradients: Callable[[], None] | None = None,
    ) -> list[Any]:
        """What each active variant's step returned; for training, with gradients in place."""
        if self.has_users_callbacks or self._has_users_steps():
            self.members.turns.taken += 1  # which may have set something, of one module or of all
        scales: list[Any] = []
        if hook == TRAINING:
            assert self.composite is not None
            scales = [self.composite.scale(place) * share for place in self.active]
        call = StepCall(hook, args, kwargs, context, scales, adds, updates, clear_gradients)
        trial = self._trials.get(hook)
        if trial is None:
            ways = StepWays(self.members, self._array, self._settings)
            trial = self._trials[hook] = FormulationTrial(
                ways.first(hook),
                what=f"{hook} of {len(self.active)} variants",
                width=len(self.active),
                device=self.members.device,
                instead=ways.instead(hook),
                more=ways.compiled if ways.is_replayed(hook) else None,
                is_timed=hook == TRAINING or self._largest is None,  # ranks may evaluate different numbers of batches
                largest=self._largest if hook == TRAINING else None,
            )
        with nullcontext() if self.members.is_one_as_usual else self.members.streams.joined():
            outs = trial.run(call)
        for place, out in zip(self.active, outs, strict=True):
            self.hooks.outputs[place] = out
        if not self._told and hook == TRAINING and trial.is_decided:
            self._tell(trial)
            self._replay_optimizers(trial)
        return outs

    def _has_users_steps(self) -> bool:
        """Whether functions of the user's run when optimizers and schedulers step."""
        own = [] if self.composite is None else [one for of_one in self.composite.each for one in of_one]
        return (
            any(overrides(self.speaker, name) for name in _OF_STEPS)
            or any(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks for one in own)
            or any(hasattr(config.scheduler, "lr_lambdas") for configs in self.configs for config in configs)
        )

    def whose_turn(self) -> int | Nobody | None:
        """The number of the variant whose Python runs just now, if one's does."""
        place = self.members.turns.whose
        return self.variants[self.active[place]].number if isinstance(place, int) else place

    def counters_of(self, place: int) -> dict[str, Any]:
        """How far a trainer has come with this variant alone, where that is not how far it has come with all."""
        if place in self.left_at or self.loops is None:
            return self.left_at.get(place, {})
        with self.loops.counting(place):
            return trainer_counters(self.speaker.trainer)

    def leave(self, places: Sequence[int]) -> dict[str, Any]:
        """These of the active variants, by their place among all, go, as at the end of runs of their own. -> What their
        last hooks log."""
        logged = self.hooks.leave(places)
        for config in (config for place in places for config in self.configs[place] if config.reduce_on_plateau):
            self._step_once_more(config)
        self.left_at.update(
            {place: self.counters_of(place) or trainer_counters(self.speaker.trainer) for place in places}
        )
        self.keep([place for place in self.active if place not in places])
        return {
            f"{name}/variant_{self.variants[place].number}": _number(value)
            for place, said in logged.items()
            for name, value in said
        }

    def _step_once_more(self, config: LRSchedulerConfig) -> None:
        """Lightning does so after an epoch's last hook."""
        trainer = self.speaker.trainer
        value = trainer.callback_metrics.get(str(config.monitor))
        if value is not None and config.interval == "epoch" and (trainer.current_epoch + 1) % config.frequency == 0:
            config.scheduler.step(value)  # type: ignore[arg-type]

    def keep(self, places: Sequence[int]) -> None:
        """Only these of the active variants, by their place among all, stay."""
        left = [place for place in self.active if place not in places]
        if not left:
            return
        self._note_streams()
        turns = [turn for turn, place in enumerate(self.active) if place in places]
        if self._array is not None:
            self._array.keep(turns)  # which keeps their streams too
        else:
            self.members.streams.keep(turns)
        self.active = [place for place in self.active if place in places]
        self.members.turns.keep(turns)
        self.members.modules[:] = [self.variants[place].module for place in self.active]
        self._log.keep(turns)
        self.hooks.keep(self.active)
        if self.composite is not None:
            self.composite.keep(self.active)
        for trial in self._trials.values():
            trial.release()
        self._told = False
        self._trials.clear()  # what was quickest for many need not be for fewer

    def divide(self, count: int) -> None:
        """Only the first ones belong to this training; the others are ordinary modules again, as if they never had."""
        self.keep(range(count))
        for variant in self.variants[count:]:
            forget(variant.module)
            variant.stream = None
        del self.variants[count:], self.configs[count:]
        if self.composite is not None:
            self.composite.divide(count)

    def report(self) -> FusionFacts:
        """How steps are computed, as far as it is known."""
        chosen = {hook: trial.chosen.name for hook, trial in self._trials.items() if trial.chosen is not None}
        if self.loops is not None:
            chosen[TRAINING] = IN_TURNS
        times = {hook: trial.step_s for hook, trial in self._trials.items()}
        report = self._array_report
        return FusionFacts(len(self.variants), chosen, times, [] if report is None else report.lines())

    @property
    def _array_report(self) -> FusionReport | None:
        """Of the array that trains, or else of one that was tried or evaluates."""
        trial = self._trials.get(TRAINING)
        chosen = None if trial is None else trial.chosen
        own = chosen.report if isinstance(chosen, ReplayedSteps) else None
        return own or (None if self._array is None else self._array.report)

    def close(self) -> None:
        """The modules are ordinary ones again, with memory of their own."""
        if self.composite is not None:
            self._note_streams()
        self.hooks.close()
        self._log.close()
        self.members.turns.close()
        for module in self.modules:
            forget(module)
        for trial in self._trials.values():
            trial.release()
        self._trials.clear()
        if self.composite is not None:
            self.composite.replay(None)
        if self._array is not None:
            self._array.release()
            self._array = None

    def _note_streams(self) -> None:
        """Where random numbers of the active variants have come to, from which another fit goes on."""
        for place, state in zip(self.active, self.members.streams.states, strict=True):
            self.variants[place].stream = state

    def _replay_optimizers(self, trial: FormulationTrial) -> None:
        """Gradients that a replay writes lie where they are, so that the optimizers' steps can be captured too."""
        assert self.composite is not None
        is_replayed = isinstance(trial.chosen, ReplayedSteps)
        self.composite.replay(self.members.device if is_replayed else None)
        if isinstance(trial.chosen, ReplayedSteps):
            trial.chosen.optimizers = self.composite.replayed

    def _tell(self, trial: FormulationTrial) -> None:
        self._told = True
        assert trial.chosen is not None
        report = self._array_report
        if trial.chosen.name == ONE_BY_ONE or report is None:
            return
        if isinstance(trial.chosen, ReplayedSteps) and trial.chosen.report is None:
            log.info("%d variants as %s: %s", len(self.active), trial.chosen.name, trial.chosen.described())
            return
        log.info(
            "%d variants as %s: %d kinds of operations computed together, %d once a variant%s",
            len(self.active),
            trial.chosen.name,
            len(report.entries) - len(report.unfused),
            len(report.unfused),
            "".join(f"\n  {one.layer or 'step'}: {one.operation} ({one.why})" for one in report.unfused[:8]),
        )


def _number(value: Any) -> Any:
    """What was logged, a metric among it."""
    found = value.compute() if isinstance(value, Metric) else value
    return found.detach() if isinstance(found, Tensor) else found


def trainer_counters(trainer: Any) -> dict[str, Any]:
    loops = trainer._checkpoint_connector._get_loops_state_dict()
    return dict(zip(COUNTERS, (trainer.current_epoch, trainer.global_step, loops), strict=True))
