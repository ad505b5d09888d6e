"""Signals that all ranks serve before the same batch. signal handler -> *AgreedSignals* -> the trainer's loop.

Lightning serves SIGTERM, and SLURM's signal to save and queue the job again, by collectives inside the handler: at any
moment, on whichever ranks got the signal. The ranks of a pipeline are at different batches. So the handler only asks;
the lifelines' threads agree on a batch that no rank has begun, without waiting for anyone's main thread:

    any rank    ask ─►  rank 0   hold ─►  all   begun: 17 | 19 | 18 ─►  rank 0   serve before 19 ─►  all

A batch depends on what others do for it and for earlier ones, so every rank comes to that point.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from pl_pipe.comm.lifelines import Fault
from pl_pipe.strategies.peer_faults import PeerError, PeerFaults
from pl_pipe.strategies.pipeline.interrupts import serve_interrupts
from pl_pipe.strategies.signal_serving import INTERRUPT, serve_signal


class Lines(Protocol):
    """Of the lifelines, what is needed here."""

    @property
    def rank(self) -> int: ...

    @property
    def first(self) -> Fault | None: ...

    def send(self, note: Any) -> None: ...


class Served(Protocol):
    """A strategy whose ranks serve signals together."""

    leaves_together: bool

    @property
    def global_rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def drain(self) -> None:
        """Finishes all that is in flight."""


class AgreedSignals:
    """One rank's part in agreeing when to serve a signal."""

    def __init__(self, lifelines: Lines, *, ranks: int, serve: Callable[[str], None]) -> None:
        self._lifelines = lifelines
        self._ranks = ranks
        self._serve = serve
        self._changed = threading.Condition()
        self._begun = 0
        self._held: str | None = None
        self._before: int | None = None
        self._answers: dict[int, int] = {}
        self._asked: list[str] = []
        self._served: set[int] = set()
        self._idle = True

    def ask(self, kind: str) -> None:
        """To be called by a signal's handler."""
        self._lifelines.send({"ask": kind})

    def holds(self, kind: str) -> bool:
        """Whether ranks have been asked to serve it, and have not come to a batch since."""
        with self._changed:
            return self._held == kind

    def begin_batch(self, *, timeout_s: float) -> None:
        """By the main thread, before every batch."""
        with self._changed:
            due = self._held is not None and self._is_due(timeout_s)
            kind = self._held
            if due:
                self._held = self._before = None
            else:
                self._begun += 1
        if due:
            assert kind is not None
            self._serve(kind)
            with self._changed:
                self._begun += 1
            self._lifelines.send({"served": kind})

    def _is_due(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._before is None:
            self._changed.wait(0.1)
            if self._lifelines.first is not None or time.monotonic() > deadline_s:
                raise PeerError(f"the ranks could not agree when to serve {self._held}")
        return self._begun >= self._before

    def hear(self, rank: int, note: Any) -> None:
        """By the lifelines' thread."""
        if not isinstance(note, dict):
            return
        if self._lifelines.rank == 0:
            self._arrange(rank, note)
        if "hold" in note:
            with self._changed:
                self._held, self._before = note["hold"], None
                self._lifelines.send({"begun": self._begun})
        if "serve_before" in note:
            with self._changed:
                self._before = int(note["serve_before"])
                self._changed.notify_all()

    def _arrange(self, rank: int, note: dict[str, Any]) -> None:
        """On rank 0: one kind after the other, each until all ranks have served it, and each once in a run."""
        if "ask" in note and note["ask"] not in self._asked:  # all ranks may have got the signal
            self._asked.append(note["ask"])
            if self._idle:
                self._idle = False
                self._lifelines.send({"hold": note["ask"]})
        if "begun" in note:
            self._answers[rank] = int(note["begun"])
            if len(self._answers) == self._ranks:
                self._lifelines.send({"serve_before": max(self._answers.values())})
        if "served" in note:
            self._served.add(rank)
            if len(self._served) == self._ranks:
                self._answers, self._served = {}, set()
                following = self._asked.index(note["served"]) + 1
                self._idle = following == len(self._asked)
                if not self._idle:
                    self._lifelines.send({"hold": self._asked[following]})


def serve_signals(
    strategy: Served,
    trainer: L.Trainer,
    faults: PeerFaults,
    stack: ExitStack,
    *,
    lines: Lines | None = None,
    later: Callable[[str], None] | None = None,
) -> AgreedSignals:
    """Replaces Lightning's handlers, and its broadcast before every batch, until the stack is closed.

    With `later`, what all ranks have agreed to serve before a batch is handed to it instead of being served then.
    """
    assert faults.lifelines is not None
    connector: Any = trainer._signal_connector
    requeue = connector._slurm_sigusr_handler_fn

    def serve(kind: str) -> None:
        strategy.drain()
        serve_signal(kind, strategy, trainer, requeue=requeue, rank=strategy.global_rank, state="nothing is in flight")

    signals = AgreedSignals(lines or faults.lifelines, ranks=strategy.world_size, serve=later or serve)

    def ask(kind: str, *_: Any) -> None:
        if kind == "requeue" or trainer.state.fn is TrainerFn.FITTING:
            signals.ask(kind)
        else:
            connector.received_sigterm = True  # an evaluation ends after its batch, and tells the others

    faults.on_note = signals.hear
    loop: Any = trainer.fit_loop.epoch_loop
    replaced = {
        (loop, "_broadcast_sigterm_tensor"): partial(signals.begin_batch, timeout_s=faults.timeout_s),
        (connector, "_sigterm_notifier_fn"): partial(ask, "sigterm"),
        (connector, "_slurm_sigusr_handler_fn"): partial(ask, "requeue"),
    }
    for (owner, name), new in replaced.items():
        setattr(owner, name, new)
        stack.callback(delattr, owner, name)
    serve_interrupts(
        trainer, ask=partial(signals.ask, INTERRUPT), is_pending=lambda: signals.holds(INTERRUPT), stack=stack
    )
    return signals
