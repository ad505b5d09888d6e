"""Epochs that end together over several pipelines. Lightning's loops -> *PipelinesEpochs* -> the stages' reunions.

    pipeline 0   b b b b b b b │ drain ┐                              ┌ validation, checkpoints ─ next epoch
    pipeline 1   b b b b       │ drain ┘ all meet ─ stage by stage everything is averaged ┘

As `pl_pipe.strategies.uneven.epochs`, but for one thing: what ends a pipeline's epoch (no more batches, `max_steps`, a
stop, a signal) its ranks have agreed on among themselves, by the means of a pipeline, so that all of them come here
after the same batch.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import lightning as L

from pl_pipe.errors import StageError
from pl_pipe.strategies.signal_serving import SIGNALS, serve_signal

if TYPE_CHECKING:
    from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy


class PipelinesEpochs:
    """Stands between Lightning's loops and a strategy, until the stack is closed. It is made before the pipeline's own
    agreement on stops, which then comes first after a batch."""

    def __init__(self, strategy: "SDPipeStrategy", trainer: L.Trainer, stack: ExitStack) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._pending: set[str] = set()
        self._united = False
        fit_loop: Any = trainer.fit_loop
        loop: Any = fit_loop.epoch_loop
        self._loop, self._fit_loop = loop, fit_loop
        connector: Any = trainer._signal_connector
        self._requeue = connector._slurm_sigusr_handler_fn
        self._plain: dict[str, Callable[..., Any]] = {}
        self._replace(stack, loop, "advance", self._advance)
        self._replace(stack, loop, "on_advance_end", self._batch_ended)
        self._replace(stack, loop, "run", self._run)
        self._replace(stack, loop, "_should_check_val_fx", self._validates)
        self._replace(stack, fit_loop, "on_advance_end", self._epoch_ended)

    def _replace(self, stack: ExitStack, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self._plain["epoch_ended" if owner is self._fit_loop else name] = getattr(owner, name)
        vars(owner)[name] = new
        stack.callback(vars(owner).pop, name, None)

    def ask(self, kind: str) -> None:
        """Before the same batch on all ranks of the pipeline: after it the epoch ends for all, and they serve it."""
        self._pending.add(kind)

    def _run(self, data_fetcher: Any) -> Any:
        self._united = False
        return self._plain["run"](data_fetcher)

    def _validates(self, data_fetcher: Any) -> bool:
        if not (self._united or self._loop.restarting):
            return False
        return bool(self._plain["_should_check_val_fx"](data_fetcher))

    def _advance(self, data_fetcher: Any) -> Any:
        try:
            with self._strategy.assembly.batch():
                return self._plain["advance"](data_fetcher)
        except StopIteration:
            raise StageError(
                "on_train_batch_start returned -1 to skip the rest of the epoch in this pipeline alone; set "
                "trainer.should_stop, or limit_train_batches"
            ) from None

    def _batch_ended(self, data_fetcher: Any) -> Any:
        stops = self._trainer.should_stop and self._fit_loop._can_stop_early
        if self._loop._is_training_done or stops or self._pending:
            counts = stops or self._pending or self._strategy.is_global_zero  # max_steps are counted there
            if counts and not self._loop.batch_progress.is_last_batch:
                self._strategy.stop_epoch()
            self._loop.batch_progress.is_last_batch = True
            self.unite()
        return self._plain["on_advance_end"](data_fetcher)

    def _epoch_ended(self) -> Any:
        if not self._united:  # a run that goes on after an epoch's last batch
            self.unite()
        answer = self._plain["epoch_ended"]()
        self._trainer.should_stop = self._strategy.assembly.agrees(self._trainer.should_stop, all_=False)
        return answer

    def unite(self) -> None:
        self._united = True
        found = self._strategy.unite({"stop": self._trainer.should_stop, "signals": sorted(self._pending)})
        self._trainer.should_stop = any(content["stop"] for content in found.values())
        signals = {kind for content in found.values() for kind in content["signals"]}
        self._pending.clear()
        for kind in SIGNALS:
            if kind in signals:
                serve_signal(
                    kind, self._strategy, self._trainer, requeue=self._requeue, rank=self._strategy.overall_rank,
                    state="all pipelines are averaged",
                )  # fmt: skip
