"""Training stops after the same batch on every rank. `trainer.should_stop` -> *AgreedStop* -> Lightning's loops.

Rank 0 has the loss, so its word counts, and it sends one after every batch. The ranks of earlier stages are ahead of it
by a known number of batches, the lag: that much later the word takes effect, on all ranks. Nobody waits for it, since
a rank that has come so far has had gradients of that batch from rank 0 already.

    rank 0        k: a callback sets should_stop ── word k ──►   …   stops after batch k + lag
    first stage   is at batch k + lag at most                    …   reads word k there, and stops

Synchronous schedules have no lag: they stop where a single process would. At drained points (after a validation, at an
epoch's end) all ranks take rank 0's word at once.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Timer
from torch import Tensor

from pl_pipe.comm import Outbox, Wait, read_as, wait_for
from pl_pipe.partition import Plan
from pl_pipe.schedule import FLUSHING, warmups
from pl_pipe.strategies.pipeline.settings import PipelineSettings

_KEPT = 64  # words; no rank is as far behind


def stop_lag(settings: PipelineSettings, plan: Plan) -> int:
    """How many batches a rank may have begun beyond the last one whose gradients rank 0 has sent it."""
    if settings.schedule in FLUSHING:
        return 0
    ahead = max((warmup + 1) * stage.replicas - 1 for warmup, stage in zip(warmups(plan), plan.stages, strict=True))
    return -(-ahead // settings.microbatches(plan))


class AgreedStop:
    """One rank's end of the agreement; all ranks must make theirs at the same point."""

    def __init__(self, trainer: L.Trainer, *, lag: int, timeout_s: float, within_epochs: bool = True) -> None:
        """
        Args:
            within_epochs: whether a word takes effect after its batch; else it does at the epoch's end.
        """
        self._trainer = trainer
        self._lag, self._within_epochs = lag, within_epochs
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._others = [rank for rank in range(trainer.world_size) if rank != 0]
        self._agreed = False
        self._words: deque[bool] = deque()
        """On rank 0: those that have not taken effect yet."""
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._timeout_s = timeout_s
        self._outbox = Outbox(timeout_s=timeout_s)
        self._told = 0
        self._validated = self._in_batch = False
        self._attach()

    def _attach(self) -> None:
        """Lightning looks at `should_stop` in two places: after each batch and after each epoch."""
        fit_loop: Any = self._trainer.fit_loop
        epoch_loop: Any = fit_loop.epoch_loop
        after_batch, after_epoch = epoch_loop.on_advance_end, fit_loop.on_advance_end

        def batch_ended(data_fetcher: Any) -> None:
            self._after_batch()
            after_batch(data_fetcher)
            if self._validated:
                self._agree_at_once()

        def epoch_ended() -> None:
            after_epoch()
            self._agree_at_once()

        epoch_loop.on_advance_end, fit_loop.on_advance_end = batch_ended, epoch_ended
        self._timers = [callback for callback in self._trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
        for timer in self._timers:
            vars(timer)["_check_time_remaining"] = self._without_asking(timer)

    def close(self) -> None:
        fit_loop: Any = self._trainer.fit_loop
        vars(fit_loop).pop("on_advance_end", None)
        vars(fit_loop.epoch_loop).pop("on_advance_end", None)
        for timer in self._timers:
            vars(timer).pop("_check_time_remaining", None)
        self._posted.clear()
        self._outbox.clear()
        dist.destroy_process_group(self._group)
        self._group = None

    @contextmanager
    def unheeded(self) -> Iterator[None]:
        """What callbacks have asked for in this batch, and others have not heard of yet, does not count within."""
        asked, self._trainer.should_stop = self._trainer.should_stop, self._agreed and self._within_epochs
        try:
            yield
        finally:
            self._trainer.should_stop = asked

    def batch_is_ending(self) -> None:
        """The hooks at a batch's end come now."""
        self._in_batch = True

    @property
    def is_asked(self) -> bool:
        """For a stop that may not have taken effect yet."""
        return self._trainer.should_stop or any(self._words) or (self._agreed and not self._within_epochs)

    def forget(self) -> None:
        """A run on trial is over, and what ended it."""
        self._agreed = self._in_batch = self._validated = False

    def has_validated(self) -> None:
        self._validated = True

    def _after_batch(self) -> None:
        self._in_batch = self._validated = False
        if self._trainer.global_rank == 0:
            self._tell(self._trainer.should_stop)
            word = self._words.popleft() if len(self._words) > self._lag else False
        else:
            self._post()
            word = self._read() if len(self._posted) > self._lag else False
        stops_now = word and not self._agreed and self._within_epochs
        self._agreed = self._agreed or word
        self._trainer.should_stop = self._agreed and self._within_epochs
        if stops_now and self._trainer.fit_loop._can_stop_early:
            strategy: Any = self._trainer.strategy
            strategy.drain()  # before Lightning turns to validation

    def _agree_at_once(self) -> None:
        self._validated = False
        word = self.is_asked
        self._trainer.should_stop = self._agreed = bool(self._trainer.strategy.broadcast(word))

    def _tell(self, word: bool) -> None:
        self._words.append(word)
        for rank in self._others:
            content = torch.tensor([int(word)], dtype=torch.uint8)
            self._outbox.add(self._told, dist.isend(content, rank, group=self._group), content, rank)
        self._told += 1
        self._outbox.settle(before=self._told - 2 * self._lag - _KEPT)

    def _post(self) -> None:
        content = torch.zeros(1, dtype=torch.uint8)
        with read_as(self._word_of_rank_0, timeout_s=self._timeout_s):
            self._posted.append((dist.irecv(content, 0, group=self._group), content))

    def _read(self) -> bool:
        work, content = self._posted.popleft()
        wait_for(work, self._word_of_rank_0, timeout_s=self._timeout_s)
        return bool(content)

    def _word_of_rank_0(self) -> Wait:
        return Wait(f"rank {self._trainer.global_rank}", "rank 0's word after a batch, whether to stop", [0])

    def _without_asking(self, timer: Timer) -> Any:
        """A Timer's check; its own asks rank 0 after every batch, for which a pipeline would wait."""
        plain = timer._check_time_remaining

        def check(trainer: L.Trainer) -> None:
            if not self._in_batch:
                plain(trainer)
            elif trainer.global_rank == 0 and timer.time_remaining() <= 0:  # type: ignore[operator]
                trainer.should_stop = True

        return check
