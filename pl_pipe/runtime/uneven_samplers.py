"""Who trains on which batch, when workers are not equally fast. strategy -> *samplers* -> DataLoader.

Training: an epoch's batches have numbers, and a worker that needs one takes the next number, as one takes a ticket. So
every batch is trained on once, by whoever comes first: fast workers do more, and all run dry at about the same time.

    worker 0   0     3  4     6  7     9          each begins with the batch of its own number, so that nobody has none
    worker 1   1        5        8
    worker 2   2 (slow)

Evaluation: the workers that live share all samples among them, without repeating any.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from pl_pipe.comm.coordination.tickets import Tickets


class TicketedSampler(Sampler[Any]):
    """Gives a worker's DataLoader the samples of the batches it has tickets for. It has no length: nobody knows it.

    A DataLoader takes tickets when it loads, so with `num_workers` a slow worker holds some that it trains on late.
    """

    def __init__(
        self,
        order: Callable[[int], Sequence[Any]],
        *,
        samples: int,
        batch_size: int,
        drop_last: bool,
        limit: int | float,
        place: int,
        workers: int,
        tickets: Tickets,
        epoch: Callable[[], int],
    ) -> None:
        """
        Args:
            order: the samples of an epoch, the same on all workers.
            limit: as the trainer's `limit_train_batches`: batches a worker, on average, or a share of all.
            place: of this worker, among so many workers.
            epoch: the number of the present epoch.
        """
        self._order, self._tickets, self._epoch = order, tickets, epoch
        self._batch_size, self._place, self._workers = batch_size, place, workers
        batches = samples // batch_size if drop_last else math.ceil(samples / batch_size)
        self._all = batches
        self.batches = min(batches, limit * workers) if isinstance(limit, int) else int(batches * limit)
        """In all, of an epoch."""
        self.rounds = 0
        """How often an epoch has begun; tickets are counted by it."""
        self._ordered_for: int | None = None

    @property
    def share(self) -> int:
        """Batches that a worker trains on in an epoch, if all are equally fast."""
        return max(1, math.ceil(self.batches / self._workers)) if self.batches else 0

    def __iter__(self) -> Iterator[Any]:
        this, self.rounds, self._ordered_for = self.rounds, self.rounds + 1, self._epoch()
        return self._samples(this, self._order(self._ordered_for), self._place, self._workers)

    @property
    def is_of_this_epoch(self) -> bool:
        """Whether the samples that are being given are the present epoch's."""
        return self._ordered_for == self._epoch()

    def _samples(self, this: int, order: Sequence[Any], place: int, workers: int) -> Iterator[Any]:
        if not self.batches:
            return
        yield from self._batch(order, place % self.batches)
        while (number := self._tickets.take(this) + workers) < self.batches:
            yield from self._batch(order, number)

    def _batch(self, order: Sequence[Any], number: int) -> Sequence[Any]:
        return order[number * self._batch_size : min((number + 1) * self._batch_size, len(order))]

    def workers_are(self, place: int, workers: int) -> None:
        """From the next epoch on: some have ended."""
        self._place, self._workers = place, workers

    def stop(self) -> None:
        """No worker gets another batch in this epoch."""
        self._tickets.close(self.rounds - 1)


class RoundSampler(Sampler[Any]):
    """For workers in step: of every round of batches each has one, and the last round begins anew where data end."""

    def __init__(
        self,
        order: Callable[[int], Sequence[Any]],
        *,
        samples: int,
        batch_size: int,
        drop_last: bool,
        place: int,
        workers: int,
        epoch: Callable[[], int],
    ) -> None:
        self._order, self._epoch = order, epoch
        self._drawn: tuple[int, Sequence[Any]] | None = None
        batches = samples // batch_size if drop_last else math.ceil(samples / batch_size)
        self._stretches = [
            range(number * batch_size, min((number + 1) * batch_size, samples))
            for start in range(0, batches, workers)
            for number in [(start + place) % batches]
        ]

    def draw(self) -> None:
        """The present epoch's order. To be called where all workers meet: a loader may come for it within a batch."""
        epoch = self._epoch()
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self._order(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.draw()
        assert self._drawn is not None
        _, order = self._drawn
        for stretch in self._stretches:
            yield from order[stretch.start : stretch.stop]

    def __len__(self) -> int:
        return sum(map(len, self._stretches))


def epoch_order(
    sampler: Any, samples: int, *, seed: int, first_workers: Callable[[Any], Any]
) -> Callable[[int], Sequence[Any]]:
    """The order in which an epoch's samples are numbered, the same on all workers.

    Shuffled anew by seed and epoch where the loader shuffles, as Lightning's DistributedSampler does; as they are where
    it does not. A sampler of the user's own is told the epoch where it listens, and draws on the first worker, which
    tells the others.
    """
    if isinstance(sampler, SequentialSampler):
        return lambda _: range(samples)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == samples:
        return lambda epoch: torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()

    def drawn(epoch: int) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        return list(sampler)

    return lambda epoch: list(first_workers(partial(drawn, epoch)))


def is_of_one_order(sampler: Any) -> bool:
    """Whether it gives all samples in the same order on all workers, every time."""
    alone = isinstance(sampler, DistributedSampler) and sampler.num_replicas == 1 and not sampler.shuffle
    return alone or isinstance(sampler, SequentialSampler)


class SharedSampler(Sampler[Any]):
    """Every worker's share of an evaluation: all samples together, none twice unless a worker would have none."""

    def __init__(self, whole: Sampler[Any] | Sequence[Any], *, shares: Callable[[], tuple[int, int]]) -> None:
        """
        Args:
            whole: all samples, in an order that all workers agree on.
            shares: this worker's place among the workers that live, and their number, as they are now.
        """
        self._whole, self._shares = whole, shares

    def __iter__(self) -> Iterator[Any]:
        place, count = self._shares()
        samples = list(self._whole)
        return iter(samples[place::count] or samples[:1])

    def __len__(self) -> int:
        (place, count), samples = self._shares(), len(self._whole)  # type: ignore[arg-type]
        return len(range(place, samples, count)) or min(1, samples)
