"""Arrays that turn out too wide for memory. first batch -> *division* -> a narrower array, others for later.

How much a step takes is known when there is a batch, and then the array exists already, with nothing trained yet. So
its last variants leave it as they would in tuning, and wait, as they were built, for an array of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from pl_pipe.errors import FusionError
from pl_pipe.log import get_logger
from pl_pipe.profiling.preserve import ModelState
from pl_pipe.strategies.fusion.array_width import evenly, free_bytes, numbers_in, widest
from pl_pipe.strategies.fusion.fused_steps import FusedSteps
from pl_pipe.strategies.fusion.settings import AUTO, ONE_BY_ONE, FusionSettings
from pl_pipe.strategies.fusion.variant_building import Variant, described
from pl_pipe.strategies.fusion.variant_memory import NotPutBackError, VariantMemory, memory_of
from pl_pipe.units import format_bytes

log = get_logger(__name__)


class DividedVariants(FusedSteps):
    settings: FusionSettings
    _as_built: list[ModelState] | None = None
    """Of each variant, before the run; None where the array is not divided, or has been looked at."""
    _waiting: list[list[Variant]]
    _arrays: list[list[Variant]]
    """Of the model that was given, as far as it is known which fit."""
    _finished: list[Variant]
    """Those of the run's arrays before this one."""

    def arrays_after(self, fusion: Mapping[str, Any]) -> list[list[Variant]]:
        """Those to be trained from a checkpoint on: its own first. Those before it get its weights.

        Its array need not be one of those that this run would make: memory may have held more, or less.
        """
        by_number = {variant.number: variant for array in self._arrays for variant in array}
        numbers, before = fusion["numbers"], fusion["before"]
        own = [by_number[number] for number in numbers if number in by_number]
        if len(own) < len(numbers) or (self.settings.max_array != AUTO and own not in self._arrays):
            return self._arrays  # which is refused when it is loaded
        self._finished = [by_number[number] for number in before if number in by_number]
        if self._finished:
            told = ", ".join(str(variant.number) for variant in self._finished)
            log.warning("variants trained before the checkpoint (%s) stay as they are, and train no further", told)
        for variant in self._finished:
            variant.module.load_state_dict(before[variant.number]["state_dict"])
        trained = [[one for one in array if one.number in before] for array in self._arrays]
        known = {*numbers, *before}
        others = [[one for one in array if one.number not in known] for array in self._arrays]
        self._arrays = [*filter(None, trained), own, *filter(None, others)]
        return [own, *filter(None, others)]

    def may_be_divided(self, variants: Sequence[Variant], trainer: L.Trainer) -> None:
        """A run of these begins."""
        self._waiting = []
        divides = self.settings.max_array == AUTO and trainer.state.fn is TrainerFn.FITTING and len(variants) > 1
        self._as_built = [ModelState(one.module, weights=False) for one in variants] if divides else None

    def take_waiting(self) -> list[list[Variant]]:
        """Arrays that the one which has been trained was too wide for."""
        waiting, self._waiting = self._waiting, []
        return waiting

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        begun, self._as_built = self._as_built, None
        if begun is not None:
            trainer = self.training.speaker.trainer  # type: ignore[union-attr]
            if trainer.global_step == 0 and trainer.ckpt_path is None:  # others have a past together
                self._divide(args, kwargs, begun)
        return super().training_step(*args, **kwargs)

    def _divide(self, args: tuple[Any, ...], kwargs: dict[str, Any], begun: Sequence[ModelState]) -> None:
        training = self.training
        assert training is not None
        variants, is_known = list(training.variants), False
        while not is_known:
            width = len(training.variants)
            found, is_known, why = self._fitting(width, args, kwargs)
            found, is_known = self._agreed(found), bool(self._agreed(int(is_known)))
            if found < 1:
                raise FusionError(f"not even one variant's step fits into memory: {why}; make batches smaller")
            if found < width:
                self._keep_first(len(evenly(training.variants, found)[0]), begun)
        kept = len(training.variants)
        if kept == len(variants):
            log.info("%d variants are trained at once%s", kept, f": {why}" if why else "")
            return
        self._waiting = evenly(variants[kept:], kept)
        place = self._arrays.index(variants)
        self._arrays[place : place + 1] = [training.variants[:], *self._waiting]
        log.warning(
            "%d variants do not fit into memory, %d do (%s): they are trained in %d arrays, one after another: %s",
            len(variants),
            found,
            why,
            1 + len(self._waiting),
            numbers_in([training.variants, *self._waiting]),
        )

    def _fitting(self, width: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, bool, str]:
        """How many variants fit, whether that was measured, and what it says; without a measurement, half of them."""
        memory, short = self._measured(args, kwargs)
        if short:
            return width // 2, False, short
        if memory is None:
            return width, True, ""
        if self._averages_gradients:  # which are put together for it
            memory = replace(memory, gradients_bytes=2 * memory.gradients_bytes)
        free = free_bytes(self.root_device) + width * memory.weights_bytes  # theirs are there already
        found = widest(memory, free=free, one_by_one=self.settings.formulation == ONE_BY_ONE)
        why = f"each takes about {memory}, {format_bytes(free)} are free on {self.root_device}"
        return min(width, found or int(memory.total_bytes <= free)), True, why

    def _measured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[VariantMemory | None, str]:
        """Of the first variant; None where its step fails, and where that is for want of memory, in which words."""
        assert self.training is not None
        short = ""
        try:
            return memory_of(
                self.training.speaker,
                self.composite.own[0],
                args,
                kwargs,
                context=self.precision_plugin.train_step_context,
                device=self.root_device,
                accumulates=self.training.speaker.trainer.accumulate_grad_batches > 1,
            ), ""
        except torch.OutOfMemoryError as error:
            short = described(error)
        except NotPutBackError:
            raise
        except Exception as error:  # the step's own, which the step itself will tell
            log.debug("what a step takes is not known: %s", described(error))
        if self.root_device.type == "cuda":
            torch.cuda.empty_cache()
        return None, short

    def _keep_first(self, count: int, begun: Sequence[ModelState]) -> None:
        training = self.training
        assert training is not None
        leaving = training.variants[count:]
        training.divide(count)
        self.lr_scheduler_configs = training.active_configs()
        for variant, state in zip(leaving, begun[count : count + len(leaving)], strict=True):
            variant.module.cpu()
            state.restore()
        if self.root_device.type == "cuda":
            torch.cuda.empty_cache()

    def _agreed(self, width: int) -> int:
        """Among devices; there is one."""
        return width
