"""cuDNN's choice of algorithms, made several times over. captures -> *the quickest* -> the thread to capture in.

While `cudnn.benchmark` is set, torch times some algorithms for each convolution, every one once, and a thread keeps to
what was quickest then. One such time says less than the algorithms differ by: on an H200, captures of the same step in
six threads took 2.80 to 2.91 ms. So several threads choose, and what they have chosen is timed as a whole.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from pl_pipe.fusion.replay import Capture
from pl_pipe.log import get_logger
from pl_pipe.strategies.fusion.variant_building import described
from pl_pipe.units import format_seconds

log = get_logger(__name__)

_THREADS = 4
"""Beside the one that trains. Choosing takes each half a second to one for DCGAN and ResNet-18, more for more kinds."""
_ENOUGH_S = 10.0
"""No further thread is begun after that."""
_TIMED = 5
_WARMUP = 2

Made = Callable[[], Capture]
"""Captures kernels, after they were warmed up, by which algorithms are chosen."""


class ChoosingThread:
    """A thread that has chosen for itself. What was captured there needs it: the algorithms end with the thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="pl_pipe-cudnn")

    def run(self, made: Made) -> Capture:
        stream: Any = torch.cuda.current_stream(self._device)

        def inside() -> Capture:
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                return made()

        return self._pool.submit(inside).result()


def quickest_thread(made: Made, device: torch.device, *, undo: Callable[[], None]) -> ChoosingThread | None:
    """None if it is the one that calls. Captures are timed one after another and given up: there may be no memory for
    two. `undo` takes back what replays have done."""
    found: dict[ChoosingThread | None, float] = {None: _replay_s(made, device, undo)}
    began = time.perf_counter()
    for _ in range(_THREADS):
        if time.perf_counter() - began > _ENOUGH_S:
            break
        thread = ChoosingThread(device)
        try:
            found[thread] = _replay_s(partial(thread.run, made), device, undo)
        except RuntimeError as error:  # for want of memory, most likely, while it chose; there is a capture without it
            log.info("a thread could not choose cuDNN's algorithms: %s", described(error))
    told = ", ".join(format_seconds(seconds) for seconds in found.values())
    log.info("replays of the step, cuDNN's algorithms chosen anew for each: %s; the quickest is used", told)
    return min(found, key=found.__getitem__)


def _replay_s(made: Made, device: torch.device, undo: Callable[[], None]) -> float:
    capture = made()
    found: list[float] = []
    try:
        for _ in range(_WARMUP + _TIMED):
            capture.replay()
            torch.cuda.synchronize(device)
            seconds = capture.device_s()
            assert seconds is not None
            found.append(seconds)
    finally:
        undo()
    return statistics.median(found[_WARMUP:])
