"""Clocks: the host's, and a CUDA device's.

A CUDA device works through a queue that the host fills. How long it takes for a layer shows only while the queue is
full: a device that waits for the host would be charged for waiting. The device's clock can therefore *hold* the queue
for a moment, so that everything a layer does is queued up before the device comes to it.
"""

import time
from statistics import median
from typing import Any, Protocol

import torch

_TRIALS = 5
_TRIAL_CYCLES = 2_000_000


class Clock(Protocol):
    """Marks moments now, and tells later how far apart they were."""

    def mark(self) -> Any: ...

    def hold(self, seconds: float) -> None:
        """Lets what follows queue up for so long before it runs, where there is a queue."""

    def settle(self) -> None:
        """Waits until everything that was started is done; then marks can be compared."""

    def seconds(self, start: Any, end: Any) -> float: ...

    def recycle(self) -> None:
        """Marks made so far will not be asked for again."""


class HostClock:
    """The time of the process that runs the step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None

    def mark(self) -> float:
        return time.perf_counter()

    def hold(self, seconds: float) -> None: ...

    def settle(self) -> None:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def recycle(self) -> None: ...


class CudaClock:
    """Events on the current stream: the moments at which the device comes by. Dear to make, so they serve again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        self._used: list[Any] = []
        self._cycles_per_s = 1.0
        trials_s = []
        for _ in range(_TRIALS):
            start = self.mark()
            _spin(_TRIAL_CYCLES)
            end = self.mark()
            self.settle()
            trials_s.append(self.seconds(start, end))
        self._cycles_per_s = _TRIAL_CYCLES / median(trials_s)

    def mark(self) -> Any:
        event: Any = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._used.append(event)
        event.record()
        return event

    def hold(self, seconds: float) -> None:
        _spin(int(seconds * self._cycles_per_s))

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def recycle(self) -> None:
        self._free += self._used
        self._used.clear()


def _spin(cycles: int) -> None:
    """Keeps the device busy with nothing."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
