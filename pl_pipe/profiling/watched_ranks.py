"""Processes on this machine that work together, and a parent that sees when one of them does not. probe -> *ranks*.

    parent ──spawn──► rank 0 … rank n-1
       ▲                 │ one pipe each: a beat twice a second, each step, the result, or why there is none
       └─────────────────┘

A rank that dies, fails or stands still ends all of them, with an error that names it. A rank whose parent is gone ends
itself, so no process is left behind.
"""

import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from pl_pipe.errors import RunError

START_S = 120.0
"""How long a process may take to import what it needs; a cold disk and many ranks are slow."""
BEAT_S = 0.5
SILENT_S = 3.0
"""A process without a beat for so long is stopped, or swapped out."""
GRACE_S = 1.0
"""After a first failure, others are awaited for so long: the cause may be reported after its effects."""

T = TypeVar("T")
Progress = Callable[[int, int, str], None]
OnStep = Callable[[int, str], None]
Task = Callable[[int, Progress], T]
"""Called in each process with its rank and a way to tell its steps; it must be picklable."""


@dataclass(frozen=True)
class _Beat:
    """I am alive."""


@dataclass(frozen=True)
class _Started:
    """All is imported."""


@dataclass(frozen=True)
class _Step:
    """I am about to do this."""

    done: int
    total: int
    doing: str


@dataclass(frozen=True)
class _Failure:
    """I cannot go on."""

    at_s: float
    """On the clock that all processes of a machine share."""
    reason: str


@dataclass(frozen=True)
class _Result(Generic[T]):
    """I am done."""

    value: T | None


@dataclass
class _Child:
    """What the parent knows of one rank."""

    rank: int
    process: BaseProcess
    pipe: Connection
    doing: str = "starting"
    done: int = -1
    """Steps done; -1 before the first."""
    started: bool = False
    finished: bool = False
    failure: _Failure | None = None
    heard_s: float = field(default_factory=time.monotonic)
    moved_s: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.finished or self.failure is not None

    def notes(self) -> list[object]:
        """What it has sent since the last call; a process that ended without a word has failed."""
        found: list[object] = []
        ended = self.process.exitcode is not None  # asked first: what it sent before is in the pipe by now
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        if ended and not any(isinstance(note, _Failure | _Result) for note in found):
            # the cause, whatever other ranks report: they lost the connection to it
            found.append(_Failure(-math.inf, _how_it_ended(self.process.exitcode or 0)))
        return found

    def take(self, note: object) -> None:
        self.heard_s = time.monotonic()
        if isinstance(note, _Beat):
            return
        self.moved_s = self.heard_s
        if isinstance(note, _Started):
            self.started, self.doing = True, "meeting the other ranks"
        elif isinstance(note, _Step):
            self.done, self.doing = note.done, note.doing
        elif isinstance(note, _Failure):
            self.failure = note
        elif isinstance(note, _Result):
            self.finished = True


def run_watched(
    task: Task[T],
    ranks: int,
    *,
    name: str,
    timeout_s: float,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
) -> T:
    """Runs `task` in `ranks` processes; rank 0's result comes back.

    `timeout_s` is the longest time in which no rank moves on. `progress` is told rank 0's steps. `on_step` is called in
    every process before each of its steps.
    """
    children: list[_Child] = []
    try:
        _start(children, task, ranks, on_step)
        result: T = _watch(children, name=name, timeout_s=timeout_s, progress=progress)
        for child in children:
            child.process.join(SILENT_S)  # they are done, and leave by themselves
        return result
    finally:
        _end(children)


def first_line(error: BaseException) -> str:
    """An error's type and first line; torch's messages go on with native stack frames."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


# --- in the parent


def _start(children: list[_Child], task: Task[T], ranks: int, on_step: OnStep | None) -> None:
    context = multiprocessing.get_context("spawn")
    with _interrupts_held():
        for rank in range(ranks):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, task, on_step, there), daemon=True)
            children.append(_Child(rank, process, here))
            process.start()
            there.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C is for the parent, which ends its children: they inherit a mask that keeps it from them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(children: list[_Child], *, name: str, timeout_s: float, progress: Progress | None) -> Any:
    """Rank 0's result, once all ranks have finished."""
    result: Any = None
    failed_s: float | None = None
    while not all(child.finished for child in children):
        waiting = [child for child in children if not child.over]
        connection.wait([end for child in waiting for end in (child.pipe, child.process.sentinel)], timeout=BEAT_S)
        for child in waiting:
            for note in child.notes():
                child.take(note)
                if child.rank == 0 and isinstance(note, _Result):
                    result = note.value
                if child.rank == 0 and isinstance(note, _Step) and progress is not None:
                    progress(note.done, note.total, note.doing)
        now_s = time.monotonic()
        if any(child.failure for child in children):
            failed_s = failed_s or now_s
            if now_s > failed_s + GRACE_S or all(child.over for child in children):
                raise _failure(children, name)
        elif now_s > max(child.moved_s for child in children) + (
            timeout_s if all(child.started for child in children) else START_S
        ):
            raise _standstill(children, name)
    return result


def _failure(children: Sequence[_Child], name: str) -> RunError:
    """The first failure, which the others follow from."""
    _, rank = min((child.failure.at_s, child.rank) for child in children if child.failure is not None)
    culprit = children[rank]
    reason = culprit.failure.reason if culprit.failure is not None else ""
    return RunError(
        f"{name}: rank {rank} of {len(children)} {reason} (last step: {culprit.doing}); "
        f"its own output, if any, is above; mend that and start again"
    )


def _standstill(children: Sequence[_Child], name: str) -> RunError:
    """Names who holds up the others: a rank without a beat, or else one that is behind and does not wait for others."""
    now_s = time.monotonic()
    held = [child for child in children if not child.finished]
    silent = [child for child in held if now_s > child.heard_s + SILENT_S]
    behind = [child for child in held if child.done == min(other.done for other in held)]
    active = [child for child in behind if not child.doing.startswith("waiting")]
    culprits = silent or active or behind
    ranks = ", ".join(str(child.rank) for child in culprits)
    still_s = now_s - max(child.moved_s for child in children)
    return RunError(
        f"{name}: rank {ranks} of {len(children)} has stood still for {still_s:.0f} s "
        f"({'stopped' if silent else 'alive'}; last step: {culprits[0].doing}); free the machine of other work, "
        f"check the network interface (cluster.interface), and start again"
    )


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} and no result"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _end(children: Sequence[_Child]) -> None:
    """Kills what still runs, and waits for it; an impatient second Ctrl-C must not cut this short."""
    with _interrupts_held():
        started = [child.process for child in children if child.process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join(10)
        for child in children:
            child.pipe.close()


# --- in each rank


def _rank_main(rank: int, task: Task[T], on_step: OnStep | None, pipe: Connection) -> None:
    lock = threading.Lock()

    def tell(note: object) -> None:
        with lock, suppress(OSError):  # a parent that is gone needs no note
            pipe.send(note)

    def beat() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        while not connection.wait([parent.sentinel], timeout=BEAT_S):
            tell(_Beat())
        os._exit(1)

    def step(done: int, total: int, doing: str) -> None:
        if on_step is not None:
            on_step(rank, doing)
        tell(_Step(done, total, doing))

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo greets its peers on the standard output
    threading.Thread(target=beat, daemon=True).start()
    tell(_Started())
    try:
        value = task(rank, step)
    except BaseException as error:
        tell(_Failure(time.monotonic(), f"failed: {first_line(error)}"))
        os._exit(1)  # at once, without waiting for the threads of a broken process group
    tell(_Result(value if rank == 0 else None))
    os._exit(0)  # taking torch down in good order costs a second, and nothing is left to save
