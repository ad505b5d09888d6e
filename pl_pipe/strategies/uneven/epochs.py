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

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from pl_pipe.strategies.pipeline.interrupts import serve_interrupts
from pl_pipe.strategies.uneven.ending import EndingTogether
from pl_pipe.strategies.uneven.loading import UnevenLoading

if TYPE_CHECKING:
    from pl_pipe.strategies.uneven.data_parallel import DataParallelStrategy


class UnevenEpochs(EndingTogether):
    """Workers in step end and validate after the same batch by themselves, as under DDP."""

    all_of = "all workers"
    alone = "on this worker alone"

    def __init__(
        self, strategy: "DataParallelStrategy", trainer: L.Trainer, stack: ExitStack, *, loading: UnevenLoading
    ) -> None:
        super().__init__(strategy, trainer, stack, loading=loading)
        self._lockstep = strategy.settings.lockstep
        self._asked_to_stop = False
        self._replace(stack, self._loop, "_broadcast_sigterm_tensor", lambda: None)  # nobody waits in every batch
        connector: Any = trainer._signal_connector
        self._replace(stack, connector, "_sigterm_notifier_fn", partial(self._ask, "sigterm"))
        self._replace(stack, connector, "_slurm_sigusr_handler_fn", partial(self._ask, "requeue"))
        serve_interrupts(
            trainer, ask=partial(self._ask, "interrupt"), is_pending=lambda: "interrupt" in self._pending, stack=stack
        )

    @property
    @override
    def _rank(self) -> int:
        return int(self._strategy.global_rank)

    def _ask(self, kind: str, *_: Any) -> None:
        """In a signal's handler: served when all have met."""
        if self._trainer.state.fn is not TrainerFn.FITTING:
            connector: Any = self._trainer._signal_connector
            connector.received_sigterm = True
        self._pending.add(kind)

    @override
    def _validates(self, data_fetcher: Any) -> bool:
        return bool(self._plain["validates"](data_fetcher)) if self._lockstep else super()._validates(data_fetcher)

    @override
    def _advance(self, data_fetcher: Any) -> Any:
        if not self._lockstep:
            return super()._advance(data_fetcher)
        with self._strategy.assembly.batch():
            return self._plain["advance"](data_fetcher)

    @override
    def _batch_ended(self, data_fetcher: Any) -> Any:
        if not self._lockstep:
            return super()._batch_ended(data_fetcher)
        if self._trainer.should_stop and not self._loop._is_training_done:
            self._asked_to_stop, self._trainer.should_stop = True, False  # the others have not heard of it
        if self._loop._is_training_done:
            self._end_epoch()
        elif self._loop._should_check_val_fx(data_fetcher):
            self.unite()
        return self._plain["batch_ended"](data_fetcher)

    @override
    def _asks_to_stop(self) -> bool:
        asked, self._asked_to_stop = self._trainer.should_stop or self._asked_to_stop, False
        return asked
