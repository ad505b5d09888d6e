"""Parts of Lightning that would see one stage or draw on one rank only, led through the pipeline.

hooks on a batch             draw from the stream of the loaders, so that every stage sees the same augmentation
numpy and random in a step   begin anew with every step, alike on all ranks
self.optimizers()            in a step that is only planned with: they are made for it, and again for the run
estimated_stepping_batches   before the run has its loaders: batches are counted, and nobody is waited for
ModelSummary                 runs the module's example before the model is divided, and shows the whole
BasePredictionWriter         writes where the predictions are
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loops import fit_loop
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from pl_pipe.profiling.preserve import kept_as_it_was
from pl_pipe.profiling.steps import mute
from pl_pipe.runtime.random_stream import PythonStream, RandomStream

if TYPE_CHECKING:
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

_BATCH_HOOK = "_call_batch_hook"
_SUMMARY = "_summary"
_FETCHER = "_select_data_fetcher"
_PROCESS = "process_dataloader"
_LOADERS_OF_LOOP = ("_combined_loader", "_data_fetcher", "_last_train_dl_reload_epoch", "max_batches")
_BEGIN_HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
_WRITING = ("write_on_batch_end", "write_on_epoch_end")


def why_in_lockstep(module: L.LightningModule) -> str | None:
    """What in a module can be trained in no other way."""
    name = type(module).__name__
    if not module.automatic_optimization:
        return f"{name} sets automatic_optimization=False"
    return f"{name} overrides backward()" if is_overridden("backward", module) else None


class HooksAlike(AbstractContextManager[None]):
    """Within it, hooks draw the same numbers on every rank: from the stream of the loaders.

    A GPU's generator is none of the stream's: hooks have one of their own, which starts as rank 0's stood.
    """

    def __init__(self, strategy: "PipeDreamStrategy") -> None:
        self._strategy, self._device = strategy, strategy.root_device
        self.own_stream: RandomStream | None = None
        """In the place of the loaders', from which a rank that loads none draws less than the others."""
        self._depth = 0
        self._other = None
        """The generator's state that is not in use: outside the hooks', and within them the model's."""
        if self._device.type == "cuda":
            self._other = strategy.broadcast(torch.cuda.get_rng_state(self._device))

    @property
    def is_entered(self) -> bool:
        return self._depth > 0

    @override
    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._exchange()
        self._stream.__enter__()

    @override
    def __exit__(self, *_: object) -> None:
        self._stream.__exit__()
        self._depth -= 1
        if self._depth == 0:
            self._exchange()

    @property
    def _stream(self) -> RandomStream:
        return self._strategy.loading if self.own_stream is None else self.own_stream

    def _exchange(self) -> None:
        if self._other is not None:
            now = torch.cuda.get_rng_state(self._device)
            torch.cuda.set_rng_state(self._other, self._device)
            self._other = now


@contextmanager
def batch_hooks_alike(alike: HooksAlike, module: L.LightningModule) -> Iterator[None]:
    """Within the block, hooks such as `on_after_batch_transfer` draw the same numbers on every rank.

    All of them are called by one method of the module, which is replaced.
    """
    plain: Callable[..., Any] = getattr(module, _BATCH_HOOK)

    def hook(*args: Any, **kwargs: Any) -> Any:
        with alike:
            return plain(*args, **kwargs)

    vars(module)[_BATCH_HOOK] = hook
    try:
        yield
    finally:
        vars(module).pop(_BATCH_HOOK, None)


def drawing_alike(step: Any) -> AbstractContextManager[None]:
    """Within it, numpy and `random` give the user's step the same numbers on every rank.

    In the process's own streams ranks would come apart: layers that draw run on one of them, and a rank leaves a step
    that reads a later stage's value. One device draws as ever.
    """
    return nullcontext() if step.seed is None else PythonStream(step.seed)


@contextmanager
def optimizers_on_demand(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Within the block, which comes before the run's optimizers, `self.optimizers()` and `self.lr_schedulers()` answer.

    A step that logs its learning rate asks them. They are made from the whole model when the first one does.
    """
    strategy = trainer.strategy

    def answering(plain: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if not strategy.optimizers:
                strategy.setup_optimizers(trainer)
            return plain(*args, **kwargs)

        return answer

    names = ("optimizers", "lr_schedulers")
    vars(module).update({name: answering(getattr(module, name)) for name in names})
    try:
        yield
    finally:
        for name in names:
            vars(module).pop(name, None)
        strategy.optimizers, strategy.lr_scheduler_configs = [], []


@contextmanager
def on_its_own(trainer: L.Trainer) -> Iterator[None]:
    """Within the block nothing waits for other ranks, which may not run what this one does, and nothing is logged."""
    strategy, loggers = trainer.strategy, trainer.loggers
    alone: dict[str, Callable[..., Any]] = {
        "barrier": lambda *_, **__: None,
        "broadcast": lambda obj, *_, **__: obj,
        "reduce_boolean_decision": lambda decision, *_, **__: decision,
    }
    with loaders_counted(trainer, lambda loader: loader):
        vars(strategy).update(alone)
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers
            for name in alone:
                vars(strategy).pop(name, None)


@contextmanager
def as_in_training(trainer: L.Trainer, loader: Any) -> Iterator[None]:
    """Within the block, which comes before the run, a step finds what the run's first one will find.

    That is `trainer.train_dataloader` and the number of its batches, and what the module's own hooks at the begin of
    training set. Afterwards the module is as it was; `loaders_counted` puts the loop's loaders back.
    """
    module, source = trainer.lightning_module, trainer.fit_loop._data_source
    before = vars(source).get("dataloader")
    vars(source)["dataloader"] = lambda: loader
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run will warn
            trainer.fit_loop.setup_data()
    finally:
        vars(source).pop("dataloader")
        if before is not None:
            vars(source)["dataloader"] = before
    hooks = [name for name in _BEGIN_HOOKS if is_overridden(name, module)]
    with kept_as_it_was(module) if hooks else nullcontext():
        if hooks:
            mute(module)
        for name in hooks:
            with suppress(Exception):  # the run will meet it
                getattr(module, name)()
        yield


@contextmanager
def loaders_counted(trainer: L.Trainer, process: Callable[[Any], Any]) -> Iterator[None]:
    """Within the block, training loaders are made for their length alone, and processed by `process`.

    Whoever asks how long training will be (`trainer.estimated_stepping_batches`) has Lightning make the loop's loaders.
    Here nothing is fetched or drawn, and the run makes its loaders itself.
    """
    stored, loop, connector = vars(trainer.strategy), trainer.fit_loop, trainer._accelerator_connector
    found = {name: getattr(loop, name) for name in _LOADERS_OF_LOOP}
    sampled, fetcher = connector.use_distributed_sampler, vars(fit_loop)[_FETCHER]
    connector.use_distributed_sampler = False  # it would exchange the loader's sampler
    vars(fit_loop)[_FETCHER] = lambda *_: _NoFetcher()
    stored[_PROCESS] = process
    try:
        yield
    finally:
        stored.pop(_PROCESS, None)
        vars(loop).update(found)
        connector.use_distributed_sampler, vars(fit_loop)[_FETCHER] = sampled, fetcher


class _NoFetcher:
    """Is given loaders, and fetches nothing."""

    def setup(self, combined_loader: Any) -> None:
        """They have a length once they are iterated, or, as here, about to be."""
        mode: Any = _SUPPORTED_MODES[combined_loader._mode]["iterator"]
        combined_loader._iterator = mode(combined_loader.flattened, combined_loader.limits)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def whole_summaries(trainer: Any) -> dict[ModelSummary, Any]:
    """What each ModelSummary will show, while this rank still has the whole model to run the example with."""
    if trainer.world_size == 1 or trainer.lightning_module.example_input_array is None:
        return {}  # what is counted without running anything is right on a divided model too
    callbacks = [
        callback for callback in trainer.callbacks if isinstance(callback, ModelSummary) and callback._max_depth
    ]
    return {callback: callback._summary(trainer, trainer.lightning_module) for callback in callbacks}


@contextmanager
def showing(summaries: dict[ModelSummary, Any]) -> Iterator[None]:
    """Within the block, these are shown instead of new ones."""
    for callback, summary in summaries.items():
        vars(callback)[_SUMMARY] = lambda *_, summary=summary: summary
    try:
        yield
    finally:
        for callback in summaries:
            vars(callback).pop(_SUMMARY, None)


@contextmanager
def nothing_written(trainer: Any) -> Iterator[None]:
    """Within the block, on a rank without predictions, no writer of them is called: it would be handed None."""
    writers = [callback for callback in trainer.callbacks if isinstance(callback, BasePredictionWriter)]
    for writer in writers:
        vars(writer).update(dict.fromkeys(_WRITING, lambda *_, **__: None))
    try:
        yield
    finally:
        for writer in writers:
            for name in _WRITING:
                vars(writer).pop(name, None)
