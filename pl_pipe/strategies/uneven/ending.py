"""What ends an epoch for all at once, whoever trains: workers or pipelines. Lightning's loops -> *EndingTogether*.

Its two kinds are `pl_pipe.strategies.uneven.epochs` and `pl_pipe.strategies.uneven.sdpipe_epochs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L

from pl_pipe.errors import StageError
from pl_pipe.strategies.signal_serving import SIGNALS, serve_signal
from pl_pipe.strategies.uneven.loading import UnevenLoading


class EndingTogether(ABC):
    """Stands between Lightning's loops and a strategy, until the stack is closed."""

    all_of: str
    alone: str
    """How messages speak of those who end together, and of one of them."""

    def __init__(self, strategy: Any, trainer: L.Trainer, stack: ExitStack, *, loading: UnevenLoading) -> None:
        self._strategy, self._trainer, self._loading = strategy, trainer, loading
        self._pending: set[str] = set()
        self._united = False
        fit_loop: Any = trainer.fit_loop
        loop: Any = fit_loop.epoch_loop
        self._loop, self._fit_loop = loop, fit_loop
        connector: Any = trainer._signal_connector
        self._requeue = connector._slurm_sigusr_handler_fn
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
        self._replace(stack, fit_loop, "on_advance_end", self._epoch_ended)

    @property
    @abstractmethod
    def _rank(self) -> int:
        """Among all."""

    @staticmethod
    def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
        vars(owner)[name] = new
        stack.callback(vars(owner).pop, name, None)

    def _run(self, data_fetcher: Any) -> Any:
        self._united = False
        resumes = self._loop.restarting or getattr(self._fit_loop, "is_resuming", False)
        self._loading.begin_epoch(data_fetcher, resumes=resumes)
        return self._plain["run"](data_fetcher)

    def _validates(self, data_fetcher: Any) -> bool:
        """Not after `limit_train_batches` batches of a fast one's, at which Lightning takes an epoch to be over."""
        if not (self._united or self._loop.restarting):
            return False
        return bool(self._plain["validates"](data_fetcher))

    def _advance(self, data_fetcher: Any) -> Any:
        try:
            with self._strategy.assembly.batch():
                return self._plain["advance"](data_fetcher)
        except StopIteration:
            raise StageError(
                f"on_train_batch_start returned -1 to skip the rest of the epoch {self.alone}; set "
                f"trainer.should_stop, or limit_train_batches"
            ) from None

    def _batch_ended(self, data_fetcher: Any) -> Any:
        if self._loop._is_training_done or self._stops or self._pending:
            self._end_epoch()
        return self._plain["batch_ended"](data_fetcher)

    @property
    def _stops(self) -> bool:
        return bool(self._trainer.should_stop and self._fit_loop._can_stop_early)

    def _end_epoch(self) -> None:
        counts = self._stops or self._pending or self._strategy.is_global_zero  # max_steps are counted there
        if counts and not self._loop.batch_progress.is_last_batch:
            self._strategy.stop_epoch()
        self._loop.batch_progress.is_last_batch = True
        self.unite()

    def _epoch_ended(self) -> Any:
        if not self._united:  # a run that goes on after an epoch's last batch
            self.unite()
        answer = self._plain["epoch_ended"]()
        # A callback may have asked on one rank.
        self._trainer.should_stop = self._strategy.assembly.agrees(self._trainer.should_stop, all_=False)
        return answer

    def _asks_to_stop(self) -> bool:
        return self._trainer.should_stop

    def unite(self) -> None:
        self._united, told = True, sorted(self._pending)
        found = self._strategy.unite({"stop": self._asks_to_stop(), "signals": told})
        self._trainer.should_stop = any(content["stop"] for content in found.values())
        signals = {kind for content in found.values() for kind in content["signals"]}
        self._pending.difference_update(told)  # one that came while all met is for the next time
        for kind in SIGNALS:
            if kind in signals:
                serve_signal(
                    kind, self._strategy, self._trainer, requeue=self._requeue, rank=self._rank,
                    state=f"{self.all_of} are averaged",
                )  # fmt: skip
