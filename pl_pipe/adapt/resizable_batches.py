"""Batches whose size may change in the middle of an epoch. ResizeBatch -> *ResizableBatches* -> DataLoader.

    order   7 2 │ 9 4 │ 0 5 8 1 │ 3 6      two a batch, then four: every sample once, whatever the sizes

Batches that a loader's workers have asked for already keep their size; there are as many of them on all ranks.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler


class ResizableBatches(BatchSampler):
    """`batch_size` holds from the next batch on; the length is that of the whole epoch, as it would end now."""

    drawn_batches = drawn_samples = 0
    _before = (0, 0)
    """Batches and samples of the epoch that were trained with before this run went on with it."""
    _totals: list[int]
    """Samples of the epoch up to each batch that was drawn since."""

    @classmethod
    def become(cls, batches: BatchSampler) -> bool:
        """Makes it one of these, if it is torch's own: a loader lets nobody set another, and its workers have this."""
        if type(batches) is BatchSampler:
            batches.__class__ = cls
        if not isinstance(batches, cls):
            return False
        batches.begin_anew()
        return True

    def take_over(self, iterator: Any) -> bool:
        """A loader's iterator that was made before these became resizable draws from them now, and goes on with the
        same random numbers. False where that cannot be: batches were taken from it, or its workers' first ones are
        asked for and the rest is dropped.
        """
        if getattr(iterator, "_num_yielded", None) != 0 or not hasattr(iterator, "_sampler_iter"):
            return False
        asked = getattr(iterator, "_send_idx", 0)
        if not asked:
            iterator._sampler_iter = iter(self)
            return True
        if self.drop_last:
            return False
        samples = len(self.sampler)  # type: ignore[arg-type]
        self._totals = [min(place * self.batch_size, samples) for place in range(asked + 1)]
        self.drawn_batches, self.drawn_samples = asked, self._totals[-1]
        iterator._sampler_iter = self._batches(chain.from_iterable(iterator._sampler_iter))
        return True

    def begin_anew(self) -> None:
        self.go_on_after(0, 0)

    def go_on_after(self, batches: int, samples: int) -> None:
        """The epoch's first batches have been trained with, and had so many samples."""
        self._before = self.drawn_batches, self.drawn_samples = batches, samples
        self._totals = [samples]

    def samples_of(self, batches: int) -> int:
        """What the epoch's first batches have in all; 0 where they were not drawn in one go, as of a loader that begins
        again because another one is longer."""
        place = batches - self._before[0]
        return self._totals[place] if 0 <= place < len(self._totals) else 0

    def __iter__(self) -> Iterator[list[int]]:
        self.go_on_after(*self._before)
        return self._batches(self._order())

    def _order(self) -> Iterator[int]:
        """Begun with the first batch: until then a sampler may be told its epoch."""
        yield from islice(iter(self.sampler), self.drawn_samples, None)

    def _batches(self, order: Iterator[int]) -> Iterator[list[int]]:
        while batch := list(islice(order, size := self.batch_size)):
            self.drawn_samples += len(batch)
            if self.drop_last and len(batch) < size:
                return
            self.drawn_batches += 1
            self._totals.append(self.drawn_samples)
            yield batch

    def __len__(self) -> int:
        rest = max(0, len(self.sampler) - self.drawn_samples)  # type: ignore[arg-type]
        return self.drawn_batches + (rest // self.batch_size if self.drop_last else -(-rest // self.batch_size))
