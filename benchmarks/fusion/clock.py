"""Times blocks of steps of a training by Lightning, fused or plain, once it has settled. trainer.fit -> *clock*."""

import cProfile
import os
import pstats
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from kernels import STEPS, kernels_written
from usage import Usage

BLOCKS = 5
_COUNTED = 10
"""Steps by which it is found how many make a block."""


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Moment:
    """Of the GPU's own time: to note it, nobody waits, and no block of steps begins with the GPU run dry."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self._event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self._event is not None:
            self._event.record()

    def since(self, earlier: "Moment") -> float:
        """Seconds; waits for the GPU."""
        if self._event is None or earlier._event is None:
            return self._at - earlier._at
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


def counted_steps(
    step: Callable[[], None], begin: float, window_s: float, *, look_s: float = 0.05, now: Callable[[], float]
) -> float:
    """Steps that end in the window, while others compute too; it begins before, and goes on for as long afterwards."""
    ends: list[tuple[float, int]] = [(now(), 0)]
    portion = 1
    while ends[-1][0] < begin + 2 * window_s:
        for _ in range(portion):
            step()
        synchronize()
        ends.append((now(), ends[-1][1] + portion))
        portion = max(1, round(look_s * portion / max(ends[-1][0] - ends[-2][0], 1e-9)))
    return _count_at(ends, begin + window_s) - _count_at(ends, begin)


def _count_at(ends: list[tuple[float, int]], moment: float) -> float:
    """How many there were, of counts at other moments; between two of these, in proportion."""
    later = next(place for place, (end, _) in enumerate(ends) if end >= moment)
    if later == 0:
        raise RuntimeError("steps began after the moment from which on they are counted")
    (before, fewer), (after, more) = ends[later - 1], ends[later]
    return fewer + (more - fewer) * (moment - before) / (after - before)


class Clock(L.Callback):
    """`is_settled(trainer, batch_idx)` says when steps are what they will be; `ready` returns when timing may begin."""

    def __init__(
        self,
        *,
        is_settled: Callable[[L.Trainer, int], bool],
        ready: Callable[[], object],
        block_s: float,
        then: Callable[[L.Trainer], None] | None = None,
        profiles: bool = False,
        kernels: Path | None = None,
    ) -> None:
        """
        Args:
            kernels: a file for the GPU's kernels of some more steps.
        """
        self._is_settled, self._ready, self._then = is_settled, ready, then
        self._block_s = block_s
        self._profile = cProfile.Profile() if profiles else None
        self._began, self._count, self._block = 0.0, 0, 0
        self._moments: list[Moment] = []
        """Ends of blocks, after the beginning of the first."""
        self._usage: Usage | None = None
        self._kernels, self._profiled = kernels, ExitStack()
        self.seconds: list[float] = []
        """Of a step, in each block."""
        self.usage: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._block == 0:
            if self._is_settled(trainer, batch_idx):
                synchronize()
                self._ready()
                self._block = -1
                self._restart()
            return
        self._count += 1
        if self._block == -1:
            if self._count == _COUNTED:
                self._begin_blocks()
        elif self.seconds:
            if self._count == STEPS and not trainer.should_stop:
                self._end(trainer)
        elif self._count == self._block:
            self._end_block(trainer)

    def _restart(self) -> None:
        self._count, self._began = 0, time.perf_counter()

    def _begin_blocks(self) -> None:
        synchronize()
        self._block = max(2, int(self._block_s / ((time.perf_counter() - self._began) / _COUNTED)))
        self._usage = Usage()
        if self._profile is not None:
            self._profile.enable()
        self._restart()
        self._moments = [Moment()]

    def _end_block(self, trainer: Any) -> None:
        self._moments.append(Moment())
        self._count = 0
        if len(self._moments) <= BLOCKS:
            return
        self.seconds = [later.since(earlier) / self._block for earlier, later in pairwise(self._moments)]
        if self._profile is not None:
            self._profile.disable()
            pstats.Stats(self._profile).sort_stats("tottime").print_stats(45)
        assert self._usage is not None
        self.usage = self._usage.stop()
        if self._kernels is None:
            self._end(trainer)
        else:
            self._profiled.enter_context(kernels_written(self._kernels))

    def _end(self, trainer: Any) -> None:
        self._profiled.close()
        if self._then is not None:
            self._then(trainer)
        trainer.should_stop = True
        trainer.limit_train_batches = 0


class Gate:
    """Files in a folder, through which the driver lets one process at a time be timed."""

    def __init__(self, folder: str | None, name: str) -> None:
        self._folder = None if folder is None else Path(folder)
        self._name = name
        self._driver = os.getppid()

    def wait(self) -> float | None:
        """Until it may be timed; from when on, by the monotonic clock, where others are timed in the same seconds.

        A driver that is gone lets nobody in: the process ends, and holds the GPU's memory no longer."""
        if self._folder is None:
            return None
        (self._folder / f"ready_{self._name}").touch()
        go = self._folder / f"go_{self._name}"
        while not go.exists():
            if os.getppid() != self._driver:
                raise SystemExit("the driver has ended")
            time.sleep(0.01)
        said = go.read_text()
        return float(said) if said else None
