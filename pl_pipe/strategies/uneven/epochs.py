"""Epochs that end together, however many batches each worker did. Lightning's loops -> *UnevenEpochs* -> reunion.

    worker 0   b b b b b b b ┐                     ┌ validation, checkpoints ─ next epoch
    worker 1   b b b b       ┤ no more batches:    │
    worker 2   b b b b b     ┘ leave ─ all meet ─ everything is averaged ┘

A worker comes here when there is no batch left, when it has done `max_steps`, when a callback asks to stop, or after a
signal. In the last two cases it lets nobody have another batch, and rank 0 also when it has done `max_steps`, which are
counted there; others that have done theirs wait for it. Each waits only for others' batches, so this cannot deadlock.
What followed on rank 0 (steps counted, learning rates) follows on all, as if all went on from the checkpoint that rank
0 may write now.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pl_pipe.errors import StageError
from pl_pipe.strategies.pipeline.interrupts import serve_interrupts
from pl_pipe.strategies.signal_serving import SIGNALS, serve_signal

if TYPE_CHECKING:
    from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy


class UnevenEpochs:
    """Stands between Lightning's loops and a strategy, until the stack is closed."""

    def __init__(self, strategy: "DataParallelStrategy", trainer: L.Trainer, stack: ExitStack) -> None:
        self._strategy, self._trainer = strategy, trainer
        self._lockstep = strategy.settings.lockstep
        self._pending: set[str] = set()
        self._asked_to_stop = self._united = False
        fit_loop: Any = trainer.fit_loop
        loop: Any = fit_loop.epoch_loop
        self._loop, self._fit_loop = loop, fit_loop
        self._plain: dict[str, Callable[..., Any]] = {
            "advance": loop.advance,
            "batch_ended": loop.on_advance_end,
            "epoch_ended": fit_loop.on_advance_end,
            "run": loop.run,
            "validates": loop._should_check_val_fx,
        }
        self._replace(stack, loop, "advance", self._advance)
        self._replace(stack, loop, "on_advance_end", self._batch_ended)
        self._replace(stack, loop, "run", self._run)
        self._replace(stack, loop, "_should_check_val_fx", self._validates)
        self._replace(stack, loop, "_broadcast_sigterm_tensor", lambda: None)  # workers do not wait in every batch
        self._replace(stack, fit_loop, "on_advance_end", self._epoch_ended)
        connector: Any = trainer._signal_connector
        self._requeue = connector._slurm_sigusr_handler_fn
        self._replace(stack, connector, "_sigterm_notifier_fn", partial(self._ask, "sigterm"))
        self._replace(stack, connector, "_slurm_sigusr_handler_fn", partial(self._ask, "requeue"))
        serve_interrupts(
            trainer, ask=partial(self._ask, "interrupt"), is_pending=lambda: "interrupt" in self._pending, stack=stack
        )

    @staticmethod
    def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
        vars(owner)[name] = new
        stack.callback(vars(owner).pop, name, None)

    def _ask(self, kind: str, *_: Any) -> None:
        """In a signal's handler: served when all have met."""
        if self._trainer.state.fn is not TrainerFn.FITTING:
            connector: Any = self._trainer._signal_connector
            connector.received_sigterm = True
        self._pending.add(kind)

    def _run(self, data_fetcher: Any) -> Any:
        self._united = False
        return self._plain["run"](data_fetcher)

    def _validates(self, data_fetcher: Any) -> bool:
        """Not after `limit_train_batches` batches of a fast worker's, at which Lightning takes an epoch to be over."""
        if not (self._lockstep or self._united or self._loop.restarting):
            return False
        return bool(self._plain["validates"](data_fetcher))

    def _advance(self, data_fetcher: Any) -> Any:
        try:
            with self._strategy.assembly.batch():
                return self._plain["advance"](data_fetcher)
        except StopIteration:
            if self._lockstep:
                raise
            raise StageError(
                "on_train_batch_start returned -1 to skip the rest of the epoch on this worker alone; set "
                "trainer.should_stop, or limit_train_batches"
            ) from None

    def _batch_ended(self, data_fetcher: Any) -> Any:
        trainer = self._trainer
        if self._lockstep and trainer.should_stop and not self._loop._is_training_done:
            self._asked_to_stop, trainer.should_stop = True, False  # the others have not heard of it
        stops = trainer.should_stop and self._fit_loop._can_stop_early
        if self._loop._is_training_done or ((stops or self._pending) and not self._lockstep):
            counts = stops or self._pending or self._strategy.is_global_zero
            if counts and not self._loop.batch_progress.is_last_batch:
                self._strategy.stop_epoch()
            self._loop.batch_progress.is_last_batch = True
            self.unite()
        elif self._lockstep and self._loop._should_check_val_fx(data_fetcher):
            self.unite()
        return self._plain["batch_ended"](data_fetcher)

    def _epoch_ended(self) -> Any:
        if not self._united:  # a run that goes on after an epoch's last batch
            self.unite()
        answer = self._plain["epoch_ended"]()
        # A callback may have asked on one worker.
        self._trainer.should_stop = self._strategy.assembly.agrees(self._trainer.should_stop, all_=False)
        return answer

    def unite(self) -> None:
        self._united = True
        asked = self._trainer.should_stop or self._asked_to_stop
        found = self._strategy.unite({"stop": asked, "signals": sorted(self._pending)})
        self._trainer.should_stop = any(content["stop"] for content in found.values())
        self._asked_to_stop = False
        signals = {kind for content in found.values() for kind in content["signals"]}
        self._pending.clear()
        for kind in SIGNALS:
            if kind in signals:
                serve_signal(
                    kind, self._strategy, self._trainer, requeue=self._requeue, rank=self._strategy.global_rank,
                    state="all workers are averaged",
                )  # fmt: skip
