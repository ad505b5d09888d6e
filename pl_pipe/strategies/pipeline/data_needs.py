"""Which ranks load data: those whose stage takes tensors of the batch. plan, first batches -> *needs* -> loaders.

Rank 0 runs the user's steps once on outlines of their first batches, in a pipeline in which it owns nothing: the books
say which stages take a tensor of the batch. Whatever a rank without the batch could not know makes all ranks load.
"""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

from pl_pipe.comm import OutlineChannel
from pl_pipe.errors import StageError
from pl_pipe.partition import Plan
from pl_pipe.profiling.preserve import ModelState, RandomState
from pl_pipe.runtime.loader_generators import generators_kept
from pl_pipe.runtime.outlined_batches import Outlines, outline, unfit_part
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.plan import step_of
from pl_pipe.strategies.pipeline.step_log import StepLog
from pl_pipe.strategies.pipeline.trainer_parts import on_its_own

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_HOOKS = {TrainerFn.FITTING: "validation_step", TrainerFn.VALIDATING: "validation_step", TrainerFn.TESTING: "test_step"}
_TOGETHER = "the loaders of an evaluation are read together, not one after another"
_NOTHING = object()


@dataclass(frozen=True)
class Loading:
    """Who loads data."""

    source: int
    """The rank that tells the others of its batches: one that meets them early."""
    others: tuple[int, ...]
    """Ranks that load none."""


class _AllLoad(Exception):  # noqa: N818 - no error: a finding
    """Why every rank has to load."""


def agreed_outlines(trainer: L.Trainer, divided: DividedModel, log: StepLog, stack: ExitStack) -> Outlines:
    """What ranks that load none get instead, from one that loads; until the stack is closed."""
    loading = _agreed_loading(trainer, divided, log)
    if not loading.others:
        return Outlines()
    channel = OutlineChannel(loading.source, loading.others, timeout_s=divided.timeout_s)
    stack.callback(channel.close)
    rank = trainer.global_rank
    return Outlines(channel, loads=rank not in loading.others, tells=rank == loading.source)


def _agreed_loading(trainer: L.Trainer, divided: DividedModel, log: StepLog) -> Loading:
    """Rank 0's answer, on every rank."""
    answer: Loading | None = None
    if trainer.is_global_zero:
        assert divided.plan is not None
        try:
            with on_its_own(trainer):
                stages = _stages_that_need(trainer, divided, log)
            answer = loading_of(divided.plan, stages, ranks=trainer.world_size)
            shown = ", ".join(map(str, answer.others))
            rank_zero_info(f"load_data=needed: ranks [{shown}] load none" if answer.others else _all("every stage has"))
        except _AllLoad as why:
            answer = Loading(0, ())
            rank_zero_info(_all(str(why)))
    answer = trainer.strategy.broadcast(answer)
    assert answer is not None
    return answer


def loading_of(plan: Plan, stages: frozenset[int], *, ranks: int) -> Loading:
    """The replicas of a stage load if it does; the last stage always does, for people look at its rank 0."""
    loading = sorted(stages | {len(plan.stages) - 1})
    loaded = {rank for stage in loading for rank in plan.stages[stage].ranks}
    return Loading(plan.stages[loading[0]].ranks[0], tuple(rank for rank in range(ranks) if rank not in loaded))


def _all(why: str) -> str:
    return f"load_data=needed: all ranks load, because {why}"


def _stages_that_need(trainer: L.Trainer, divided: DividedModel, log: StepLog) -> frozenset[int]:
    """Over all steps that this call of the trainer will run."""
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    if trainer.state.fn not in _HOOKS:
        raise _AllLoad("this is a prediction, whose writers ask every loader for its indices")
    for owner in (module, getattr(trainer, "datamodule", None)):
        for hook in _TRANSFER_HOOKS:
            if owner is not None and is_overridden(hook, owner):
                raise _AllLoad(f"{type(owner).__name__}.{hook} works on the batch")
    first = divided.first_batch
    if first is None:
        raise _AllLoad("the step runs backward or optimizers itself, for which no batch was looked at ahead")
    found: frozenset[int] = frozenset()
    needs = _Needs(module, divided, log)
    fitting = trainer.state.fn is TrainerFn.FITTING
    if fitting:
        _check_loaders(first.loaders)
        found |= needs.of("training_step", first.content, plugin.train_step_context(), training=True)
    hook = _HOOKS[trainer.state.fn]
    loaders: Sequence[Any] = () if fitting else first.loaders
    if fitting and trainer.enable_validation and is_overridden(hook, module):
        loaders = _loaders_of(trainer.fit_loop.epoch_loop.val_loop)
    elif not fitting and not first.in_turn:
        raise _AllLoad(_TOGETHER)
    for index, batch in enumerate(_first_of_each(loaders)):
        context = plugin.val_step_context()
        place = index if len(loaders) > 1 else None
        found |= needs.of(hook, plugin.convert_input(batch), context, training=False, dataloader_idx=place)
    return found


@dataclass(frozen=True)
class _Needs:
    """Runs steps for what they need of their batches; the model is left as it was."""

    module: L.LightningModule
    divided: DividedModel
    log: StepLog

    def of(
        self,
        hook: str,
        batch: Any,
        context: AbstractContextManager[Any],
        *,
        training: bool,
        dataloader_idx: int | None = None,
    ) -> frozenset[int]:
        unfit = unfit_part(batch)
        if unfit is not None:
            raise _AllLoad(f"the batch holds {unfit}")
        try:
            content = pickle.loads(pickle.dumps(outline(batch)))
        except Exception as error:
            raise _AllLoad(f"the batch cannot be pickled ({error})") from error
        run: Callable[[Any, Any], Any] = step_of(hook, dataloader_idx=dataloader_idx)

        def step(ghosts: Any) -> None:
            with self.log.hearing(ghosts), context:
                run(self.module, content)

        random_state, model_state = RandomState(), ModelState(self.module, weights=False)
        try:
            self.module.train(training)
            with torch.set_grad_enabled(training):
                return self.divided.pipe.stages_needing_batch(step)
        except StageError as error:
            raise _AllLoad(f"of {hook}, {error}") from error
        except Exception as error:  # of the user's step, which may ask for what is not there before training
            raise _AllLoad(f"{hook} could not be run ahead of training: {error!r}") from error
        finally:
            self.log.records.clear()
            model_state.restore()
            random_state.restore()


def _loaders_of(loop: Any) -> list[Any]:
    before = RandomState()
    try:
        loader = loop._data_source.dataloader()
    finally:
        before.restore()
    combined = loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "sequential")
    if combined._mode != "sequential":
        raise _AllLoad(_TOGETHER)
    return list(combined.flattened)


def _check_loaders(loaders: Sequence[Any]) -> None:
    for loader in loaders:
        if type(loader) is not DataLoader:
            raise _AllLoad(f"a loader is a {type(loader).__name__}, no plain DataLoader")


def _first_of_each(loaders: Sequence[Any]) -> Iterator[Any]:
    """The first batches of an evaluation's loaders; nobody's random numbers are touched."""
    _check_loaders(loaders)
    if any(isinstance(loader.dataset, IterableDataset) for loader in loaders):
        raise _AllLoad("an evaluation's data are a stream, of which nothing is to be taken before it begins")
    for loader in loaders:
        before = RandomState()
        try:
            with generators_kept([loader]):
                batch = next(iter(loader), _NOTHING)
        finally:
            before.restore()
        if batch is _NOTHING:
            raise _AllLoad("an evaluation's loader gives no batch")
        yield batch
