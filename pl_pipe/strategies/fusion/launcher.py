"""Runs a trainer once for each array of variants. trainer.fit -> *launcher* -> trainer's own implementation.

Variants that cannot be one array (another architecture, another batch size, too many for memory) are trained one array
after another, by loops that start anew; what they log goes to the same loggers, under their own names.
"""

import atexit
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from pl_pipe.fusion.comparing import structure_of
from pl_pipe.strategies.fusion.loader_generators import LoaderGenerators
from pl_pipe.strategies.fusion.support import check_lightning
from pl_pipe.strategies.fusion.trainer_standing import Standing
from pl_pipe.strategies.fusion.variant_batch_size import batch_size_of
from pl_pipe.strategies.fusion.variant_building import Variant
from pl_pipe.strategies.fusion.variant_checkpoints import FUSION
from pl_pipe.strategies.pipeline.launcher import end_at_exit

if TYPE_CHECKING:
    from pl_pipe.strategies.fusion.fused_variants import FusedVariants

_MODEL, _CHECKPOINT, _WEIGHTS_ONLY = "model", "ckpt_path", "weights_only"
"""Arguments of the trainer's implementations of fit, validate, test and predict."""


class FusionLauncher(_Launcher):
    def __init__(self, strategy: "FusedVariants", processes: Any = None) -> None:
        """`processes` is the launcher of the other ranks, if there are any."""
        self._strategy = strategy
        self._processes = processes
        self._module: L.LightningModule | None = None
        self._ended: dict[int, Standing] = {}
        """For each variant of that module by number: how its last fit left the trainer."""
        self._left: Tensor | None = None
        """Where torch's generator stood after the last fit."""

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self._processes is None

    @property
    def procs(self) -> list[Any]:
        return [] if self._processes is None else list(self._processes.procs)

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        if self._processes is None:
            return self._run(function, args, kwargs, trainer)
        try:
            return self._processes.launch(lambda: self._run(function, args, kwargs, trainer), trainer=trainer)
        except BaseException:
            atexit.register(end_at_exit, self.procs)  # who has not met this rank yet would wait for it
            raise

    @override
    def kill(self, signum: Any) -> None:
        if self._processes is not None:
            self._processes.kill(signum)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trainer: L.Trainer | None
    ) -> Any:
        strategy = self._strategy
        module = args[0] if args and isinstance(args[0], L.LightningModule) else strategy.lightning_module
        if trainer is None or module is None:
            return function(*args, **kwargs)
        if strategy.root_device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]  # its generators are kept, and put back, only from then on
        call = inspect.signature(function).bind(*args, **kwargs)
        given = call.arguments
        for part in given.values():
            check_lightning(part)
        fitting = trainer.state.fn is TrainerFn.FITTING
        strategy.weights_only = given.get(_WEIGHTS_ONLY)
        arrays = strategy.prepare(module, fitting=fitting, loads=given.get(_CHECKPOINT) is not None)
        if fitting:
            arrays = self._from_checkpoint(arrays, trainer, given)
        for variants in arrays:  # before any is trained
            with batch_size_of(variants[0], given, fitting=fitting):
                pass
        state, begun = copy.copy(trainer.state), Standing(trainer)
        accumulated = trainer.accumulate_grad_batches
        shuffling = LoaderGenerators(list(given.values()))
        is_several, is_resumed = len(arrays) > 1, given.get(_CHECKPOINT) is not None
        if fitting and (is_resumed or module is not self._module):
            self._module, self._ended = module, {}
        # Else someone has seeded, or drawn, since the last fit, and separate runs would go on from there.
        goes_on = self._left is not None and torch.equal(self._left, begun.random.torch_state)
        results: list[Any] = []
        while arrays:
            variants, *arrays = arrays
            if results:
                trainer.state = copy.copy(state)
            if fitting:
                last = self._ended.get(variants[0].number)
                own = last if last is not None and is_several and goes_on else begun
                own.random.restore()
                if last is None:
                    _as_if_built_last(variants[0], module)
                if results:
                    shuffling.restore()
                    trainer.accumulate_grad_batches = accumulated  # a scheduler may have changed it
                    given[_CHECKPOINT] = None
                if results or (is_several and last is not None):
                    (last or begun).put_back(trainer, anew=is_resumed)
            if given.get(_MODEL) is not None:
                given[_MODEL] = variants[0].module  # which is asked for loaders, if none are given
            strategy.arrays_before = len(results)
            strategy.begin(variants, trainer)
            with batch_size_of(variants[0], given, fitting=fitting):
                results.append(function(*call.args, **call.kwargs))
            strategy.end()
            waiting = strategy.take_waiting()
            if fitting:
                self._note_end(variants, waiting, trainer)
            arrays = [*waiting, *arrays]
        return _merged(results)

    def _note_end(self, variants: Sequence[Variant], waiting: Sequence[Sequence[Variant]], trainer: L.Trainer) -> None:
        ended, later = Standing(trainer), {variant.number for array in waiting for variant in array}
        self._ended.update({variant.number: ended for variant in variants if variant.number not in later})
        self._left = ended.random.torch_state

    def _from_checkpoint(
        self, arrays: list[list[Variant]], trainer: L.Trainer, given: Mapping[str, Any]
    ) -> list[list[Variant]]:
        """Where there is one, its array comes first, and those before it have been trained."""
        path = given.get(_CHECKPOINT)
        if path is None or sum(map(len, arrays)) == 1:
            return arrays
        found = trainer._checkpoint_connector._select_ckpt_path(  # which knows `last` and `best`
            TrainerFn.FITTING, path, model_provided=True, model_connected=trainer.lightning_module is not None
        )
        if found is None:
            return arrays
        fusion = self._strategy.load_checkpoint(found).get(FUSION)
        return arrays if fusion is None else self._strategy.arrays_after(fusion)


def _as_if_built_last(variant: Variant, given: L.LightningModule) -> None:
    """A model of another architecture has drawn other numbers for its weights than the one that was given; loaders and
    steps go on after these, as in a run of its own."""
    if variant.follows and structure_of(variant.module) != structure_of(given):
        torch.set_rng_state(variant.random_state)


def _merged(results: Sequence[Any]) -> Any:
    """Of several arrays: metrics of all by data loader, predictions of all by batch (and by data loader, of several).

    An array with smaller batches has more of them; the last ones are then its variants' alone.
    """
    found = [result for result in results if result is not None]
    if found and all(isinstance(result, list) for result in found):
        return [_merged(parts) for parts in zip_longest(*found)]
    if found and all(isinstance(result, dict) for result in found):
        return {name: value for result in found for name, value in result.items()}
    return results[0]
