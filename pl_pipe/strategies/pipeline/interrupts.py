"""Ctrl-C: the first lets all ranks end together, a second one at once. terminal -> *interrupts* -> AgreedSignals.

A terminal sends it to all ranks, each somewhere in its step; a user perhaps to rank 0 alone. In the middle of a step a
rank cannot end in good order: others wait for it, and no checkpoint could be put together. So the ranks finish what is
in flight and raise KeyboardInterrupt before the same batch. Then Lightning does as with one process,
`ModelCheckpoint(save_on_exception=True)` included.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning as L
from lightning.fabric.utilities import rank_zero_info


def serve_interrupts(
    trainer: L.Trainer, *, ask: Callable[[], None], is_pending: Callable[[], bool], stack: ExitStack
) -> None:
    """Until the stack is closed. A handler that the user has set stays; and outside of training Ctrl-C ends at once."""
    plain = signal.getsignal(signal.SIGINT)
    if plain is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        return
    asked = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked or not trainer.training:
            signal.default_int_handler(number, frame)
        asked = True
        ask()
        rank_zero_info("\nInterrupted: all ranks end before the next batch; press Ctrl-C again to end at once")

    def put_back() -> None:
        if signal.getsignal(signal.SIGINT) is handle:  # Lightning ignores the signal while it shuts down
            signal.signal(signal.SIGINT, plain)
        kept: dict[Any, Any] = trainer._signal_connector._original_handlers  # which Lightning will put back after us
        if kept.get(signal.SIGINT) is handle:
            kept[signal.SIGINT] = plain

    fit_loop: Any = trainer.fit_loop
    on_run_end = fit_loop.on_run_end

    def run_ended() -> Any:
        answer = on_run_end()
        if is_pending():  # there was no next batch
            raise KeyboardInterrupt
        return answer

    signal.signal(signal.SIGINT, handle)
    stack.callback(put_back)
    fit_loop.on_run_end = run_ended
    stack.callback(delattr, fit_loop, "on_run_end")
