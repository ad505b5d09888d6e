"""Runs a trainer once for each array of variants. trainer.fit -> *launcher* -> trainer's own implementation.

Variants that cannot be one array (another architecture, another batch size, too many for memory) are trained one array
after another, by loops that start anew; what they log goes to the same loggers, under their own names.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.fusion.comparing import structure_of
from pl_pipe.profiling.preserve import RandomState
from pl_pipe.strategies.fusion.loader_generators import LoaderGenerators
from pl_pipe.strategies.fusion.variant_building import Variant
from pl_pipe.strategies.fusion.variant_checkpoints import FUSION

if TYPE_CHECKING:
    from pl_pipe.strategies.fusion.fused_variants import FusedVariants

_CHECKPOINT = 4  # its place among the arguments of Trainer._fit_impl
_BATCH_SIZE = "batch_size"


class FusionLauncher(_Launcher):
    def __init__(self, strategy: "FusedVariants", processes: Any = None) -> None:
        """`processes` is the launcher of the other ranks, if there are any."""
        self._strategy = strategy
        self._processes = processes

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
        return self._processes.launch(lambda: self._run(function, args, kwargs, trainer), trainer=trainer)

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
        arrays = strategy.prepare(module)
        fitting = trainer.state.fn is TrainerFn.FITTING
        if fitting:
            arrays = self._from_checkpoint(arrays, trainer, args)
        random, begun, callbacks = RandomState(), copy.copy(trainer.state), _callback_states(trainer)
        shuffling = LoaderGenerators((*args, *kwargs.values()))
        results: list[Any] = []
        while arrays:
            variants, *arrays = arrays
            if results:
                trainer.state = copy.copy(begun)
            if fitting:
                _as_in_a_run_of_its_own(variants[0], module, random)
                if results:
                    shuffling.restore()
                    _start_anew(trainer, callbacks)
                    args = (*args[:_CHECKPOINT], None, *args[_CHECKPOINT + 1 :])
            strategy.begin(variants, trainer)
            with _batch_size(variants[0], (*args, *kwargs.values())):
                results.append(function(*args, **kwargs))
            strategy.end()
            arrays = [*strategy.take_waiting(), *arrays]
        return _merged(results)

    def _from_checkpoint(
        self, arrays: list[list[Variant]], trainer: L.Trainer, args: tuple[Any, ...]
    ) -> list[list[Variant]]:
        """Where there is one, its array comes first, and those before it have been trained."""
        path = args[_CHECKPOINT] if len(args) > _CHECKPOINT else None
        if path is None or sum(map(len, arrays)) == 1:
            return arrays
        found = trainer._checkpoint_connector._select_ckpt_path(  # which knows `last` and `best`
            TrainerFn.FITTING, path, model_provided=True, model_connected=trainer.lightning_module is not None
        )
        fusion = None if found is None else self._strategy.load_checkpoint(found, weights_only=True).get(FUSION)
        return arrays if fusion is None else self._strategy.arrays_after(fusion)


def _as_in_a_run_of_its_own(variant: Variant, given: L.LightningModule, random: RandomState) -> None:
    """Loaders and steps draw what they would if this array were the only one.

    A model of another architecture has drawn other numbers for its weights than the one that was given.
    """
    random.restore()
    if variant.follows and structure_of(variant.module) != structure_of(given):
        torch.set_rng_state(variant.random_state)


def _start_anew(trainer: Any, state: list[tuple[Any, dict[str, Any]]]) -> None:
    """Loops at their beginning, and callbacks that decide by what they have seen as they were."""
    before = trainer.fit_loop
    trainer.fit_loop = _FitLoop(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
    steps = before.epoch_loop
    trainer.fit_loop.epoch_loop = _TrainingEpochLoop(trainer, min_steps=steps.min_steps, max_steps=steps.max_steps)
    trainer.should_stop = False
    for callback, attributes in state:
        vars(callback).clear()
        vars(callback).update({name: _copy(value) for name, value in attributes.items()})


def _callback_states(trainer: Any) -> list[tuple[Any, dict[str, Any]]]:
    return [
        (callback, {name: _copy(value) for name, value in vars(callback).items()})
        for callback in trainer.callbacks
        if isinstance(callback, EarlyStopping | Checkpoint)
    ]


def _copy(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else value


@contextmanager
def _batch_size(variant: Variant, arguments: Sequence[Any]) -> Iterator[None]:
    """Within the block, the data has the variant's batch size, where it asks for one."""
    if variant.batch_size is None:
        yield
        return
    data = next((one for one in arguments if isinstance(one, L.LightningDataModule)), None)
    if data is None or (not hasattr(data, _BATCH_SIZE) and _BATCH_SIZE not in data.hparams):
        raise ConfigError(
            f"variant {variant.number} sets batch_size={variant.batch_size}, which a given data loader has fixed; "
            "give a LightningDataModule with an attribute or hyper-parameter batch_size"
        )
    before = vars(data).get(_BATCH_SIZE), data.hparams.get(_BATCH_SIZE)
    _set_batch_size(data, variant.batch_size, variant.batch_size)
    try:
        yield
    finally:
        _set_batch_size(data, *before)


def _set_batch_size(data: L.LightningDataModule, attribute: Any, hyper_parameter: Any) -> None:
    if _BATCH_SIZE in vars(data):
        vars(data)[_BATCH_SIZE] = attribute
    if _BATCH_SIZE in data.hparams:
        data.hparams[_BATCH_SIZE] = hyper_parameter


def _merged(results: list[Any]) -> Any:
    """Of several arrays: metrics of all by data loader, predictions of all by batch."""
    if len(results) == 1 or not all(isinstance(result, list) for result in results):
        return results[0]
    if all(isinstance(item, dict) for result in results for item in result):
        return [{name: value for part in parts for name, value in part.items()} for parts in zip(*results, strict=True)]
    return results[0]
