"""What users see of uneven workers: sizes of groups, waiting, staleness, samples a second. strategy -> *UnevenReport*.

Logged at the end of every epoch, as means over the workers: of waiting, over all steps; of groups and staleness, over
the steps that had any. `sync/samples_per_s/rank2` is a worker's own.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from typing_extensions import override

from pl_pipe.comm.synchronizers import StepFacts


@dataclass
class WorkerEpoch:
    """One worker's share of an epoch."""

    steps: int = 0
    meetings: int = 0
    """Steps after which it averaged with others, or came to do so."""
    samples: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    members: int = 0
    """Of its groups, added up."""
    staleness: int = 0
    """Of its meetings, added up."""
    partners: Counter[int] = field(default_factory=Counter)
    """How often it averaged with whom."""


class UnevenReport(L.Callback):
    """Counts on every worker; the strategy brings the counts together."""

    def __init__(self) -> None:
        self.workers: dict[int, WorkerEpoch] = {}
        """Of the epoch that ended last."""
        self.samples = 0
        """That all workers have trained on in this fit."""
        self.partners: dict[int, Counter[int]] = {}
        """How often each worker has averaged with whom, in this fit."""
        self.name_of: Callable[[int], str] = "rank{}".format
        """The worker that a rank belongs to."""
        self._own = WorkerEpoch()
        self._began_s = 0.0

    def attach(self, trainer: Any, *, rank: int) -> None:
        self.workers, self.partners, self.samples = {}, {}, 0
        self._own, self._rank = WorkerEpoch(), rank
        trainer.callbacks.insert(0, self)

    def detach(self, trainer: Any) -> None:
        if self in trainer.callbacks:
            trainer.callbacks.remove(self)

    def begin_epoch(self) -> None:
        self._own, self._began_s = WorkerEpoch(), time.perf_counter()

    def end_epoch(self) -> None:
        self._own.seconds = time.perf_counter() - self._began_s

    def count(self, batch: Any) -> None:
        try:
            self._own.samples += extract_batch_size(batch)
        except MisconfigurationException:
            return  # a batch that does not tell its size

    def note(self, facts: StepFacts | None) -> None:
        own = self._own
        own.steps += 1
        if facts is not None:
            own.meetings += 1
            own.members += len(facts.members)
            own.waited_s += facts.waited_s
            own.staleness += facts.staleness
            own.partners.update(member for member in facts.members if member != self._rank)

    def epoch(self) -> WorkerEpoch:
        return self._own

    def gathered(self, workers: dict[int, WorkerEpoch]) -> None:
        self.workers = workers
        self.samples += sum(worker.samples for worker in workers.values())
        for rank, worker in workers.items():
            self.partners.setdefault(rank, Counter()).update(worker.partners)
        self._own = WorkerEpoch()

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same on all workers, which have been told each other's counts."""
        workers = self.workers
        steps = max(1, sum(worker.steps for worker in workers.values()))
        meetings = sum(worker.meetings for worker in workers.values())
        found = {
            "group_size": sum(worker.members for worker in workers.values()) / meetings if meetings else 1.0,
            "waited_s": sum(worker.waited_s for worker in workers.values()) / steps,
            "staleness": sum(worker.staleness for worker in workers.values()) / max(1, meetings),
            "workers": float(len({self.name_of(rank) for rank in workers})),
        }
        for rank, worker in workers.items():
            if worker.samples:  # a pipeline's are counted where its last stage is
                found[f"samples_per_s/{self.name_of(rank)}"] = worker.samples / max(worker.seconds, 1e-9)
        for name, value in found.items():
            pl_module.log(f"sync/{name}", value, sync_dist=True)
