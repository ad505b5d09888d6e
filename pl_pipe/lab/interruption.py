"""Signals that end a command end its lab first. user or system -> *interruption* -> lab."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_OTHERS = (signal.SIGTERM, signal.SIGHUP)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
# Looked up here: between fork and exec, a lock of another thread may never be free. Only Linux has it.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the block as Ctrl-C does, so that what it holds is removed.

    Where a program handles them itself, or ignores them as under `nohup`, it goes on to do so.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    unhandled = [number for number in _BY_OTHERS if signal.getsignal(number) is signal.SIG_DFL]
    with _handling(dict.fromkeys(unhandled, leave)):
        yield


@contextmanager
def undisturbed() -> Iterator[Callable[[], bool]]:
    """No signal ends the block half-way; the function given says whether one has come, and there is need to hurry."""
    come: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        come.append(number)

    with _handling(dict.fromkeys(_ENDING, note)):
        yield lambda: bool(come)


@contextmanager
def deferred() -> Iterator[None]:
    """Signals that come within the block count when it is over: where a process is forked, Python calls hooks that drop
    what is raised in them, and a signal's exception would be lost."""
    come: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        come.append(number)

    with _handling(dict.fromkeys(_ENDING, note)):
        yield
    for number in come:
        signal.raise_signal(number)


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_parent(parent: int) -> None:
    """For a new process, before it runs its program: it is asked to end when the process that started it dies, and
    ends at once if that one, `parent`, has died already."""
    if _prctl is not None:
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)
