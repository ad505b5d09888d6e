"""Makes workers late on purpose, under any strategy. `hetero=` -> *HeteroDelays* -> training."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
from typing_extensions import override

from pl_pipe.errors import ConfigError
from pl_pipe.hetero import DelayModel, LateAtRandom, SlowPeriods, SlowWorker, Trace, check_number, traced_ranks

_FORWARDS = 3.0  # a backward takes about two forwards
_SEEN = 50


class HeteroDelays(L.Callback):
    """Sleeps before the forward and before the backward of every batch, as a model says for this rank.

    Models that slow a worker down by a factor need to know what it computes for: `step_s`, or else three times the
    median forward of this rank so far. In a pipeline a forward waits for other stages; give `step_s` there.
    Batches that another replica of this rank's stage computes are not delayed here.
    """

    def __init__(
        self, make: Callable[[int], DelayModel], *, step_s: float | None = None, ranks: Sequence[int] = ()
    ) -> None:
        """
        Args:
            make: the model of a rank.
            ranks: those that it is about, if not all; each must be there, or nobody would be late.
        """
        self._ranks = ranks
        self._make = make
        self._step_s = None if step_s is None else check_number("step_s", step_s, least=0.0)
        self._model: DelayModel | None = None
        self._forwards_s: deque[float] = deque(maxlen=_SEEN)
        self._began_s = 0.0
        self._computes = True
        self.slept_s = 0.0
        """In all, on this rank."""

    def check_ranks(self, there: int) -> None:
        """Refuses ranks that are not among those of a run; before it starts any process, where that is known."""
        absent = [rank for rank in self._ranks if not 0 <= rank < there]
        if absent:
            raise ConfigError(
                f"hetero.ranks={list(self._ranks)}, but there is no rank {absent[0]} among {there}; give numbers up "
                f"to {there - 1}, or set trainer.devices={max(absent) + 1} or more"
            )

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.check_ranks(trainer.num_nodes * trainer.num_devices)
        self._model = self._make(getattr(trainer.strategy, "overall_rank", trainer.global_rank))
        self.slept_s = 0.0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._computes = getattr(trainer.strategy, "computes_next_batch", True)
        self._sleep("forward")
        self._began_s = time.perf_counter()

    @override
    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        if self._computes:
            self._forwards_s.append(time.perf_counter() - self._began_s)
        self._sleep("backward")

    def _sleep(self, phase: str) -> None:
        assert self._model is not None
        if not self._computes:
            return
        delay_s = self._model.delay_s(phase, self._compute_s())
        if delay_s > 0:
            time.sleep(delay_s)
            self.slept_s += delay_s

    def _compute_s(self) -> float:
        if self._step_s is not None:
            return self._step_s
        return _FORWARDS * statistics.median(self._forwards_s) if self._forwards_s else 0.0


# What conf/hetero/*.yaml name.


def artifact(*, seed: int, delay_s: float, probability: float) -> HeteroDelays:
    LateAtRandom(rank=0, seed=seed, delay_s=delay_s, probability=probability)  # refuses before any process is started
    return HeteroDelays(lambda rank: LateAtRandom(rank=rank, seed=seed, delay_s=delay_s, probability=probability))


def slow_worker(*, ranks: list[int], factor: float, step_s: float | None) -> HeteroDelays:
    if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
        raise ConfigError(f"hetero.ranks={ranks!r}; give a list of ranks, such as [1]")
    SlowWorker(rank=0, ranks=ranks, factor=factor)
    return HeteroDelays(lambda rank: SlowWorker(rank=rank, ranks=ranks, factor=factor), step_s=step_s, ranks=ranks)


def random_periods(
    *, seed: int, factor: float, slow_steps: float, usual_steps: float, step_s: float | None
) -> HeteroDelays:
    def make(rank: int) -> SlowPeriods:
        return SlowPeriods(rank=rank, seed=seed, factor=factor, slow_steps=slow_steps, usual_steps=usual_steps)

    make(0)
    return HeteroDelays(make, step_s=step_s)


def trace(*, path: str | None) -> HeteroDelays:
    if path is None:
        raise ConfigError("hetero=trace needs the recorded delays; give hetero.path=FILE.csv")
    return HeteroDelays(lambda rank: Trace(rank=rank, path=path), ranks=traced_ranks(path))
