"""An epoch's samples for a number of ranks that may change in the middle of it. elastic policy -> *ElasticSampler*.

All ranks know one order of the whole epoch. So many of its samples have been trained with; the rest is dealt out in
turns to the ranks that are there now, so that k batches of b samples on n ranks are the next k·b·n of the order.

    order    7 2 9 4 │ 0 5 8 1 3 6        two ranks have had four; three ranks go on: 0 1 …, 5 3 …, 8 6 …
"""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from pl_pipe.adapt.resizable_batches import ResizableBatches
from pl_pipe.errors import ConfigError


class ElasticSampler(Sampler[int]):
    """At the end of an epoch some samples repeat where they cannot be divided evenly, as in DistributedSampler."""

    def __init__(self, samples: int, *, rank: int, ranks: int, shuffle: bool, seed: int = 0) -> None:
        self.samples, self.rank, self.ranks, self.shuffle, self.seed = samples, rank, ranks, shuffle, seed
        self.epoch = 0
        self.consumed = 0
        """Samples of the epoch that have been trained with, by all ranks together."""

    @classmethod
    def within(cls, batches: Any, *, rank: int, ranks: int) -> "ElasticSampler":
        """In the place of a batch sampler's own, which Lightning or the user has chosen."""
        if type(batches) not in (BatchSampler, ResizableBatches):
            raise ConfigError(
                f"a {type(batches).__name__} has an order of batches of its own, which cannot be divided anew among "
                f"other numbers of workers; use a DataLoader with batch_size=…"
            )
        plain = batches.sampler
        if isinstance(plain, cls):
            return plain
        whole = type(plain) in (DistributedSampler, RandomSampler, SequentialSampler)
        if not whole or getattr(plain, "replacement", False) or getattr(plain, "_num_samples", None) is not None:
            raise ConfigError(
                f"{type(plain).__name__}{' with replacement or num_samples' if whole else ''} gives the order of "
                f"samples, which cannot be divided anew among other numbers of workers; use a DataLoader with "
                f"shuffle=True or False"
            )
        shuffle = plain.shuffle if isinstance(plain, DistributedSampler) else isinstance(plain, RandomSampler)
        data: Any = plain.dataset if isinstance(plain, DistributedSampler) else plain.data_source
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        made = cls(len(data), rank=rank, ranks=ranks, shuffle=shuffle, seed=seed)
        batches.sampler = made
        return made

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        """The whole epoch's."""
        if not self.shuffle:
            return list(range(self.samples))
        draws = torch.Generator().manual_seed(self.seed + self.epoch)
        found: list[int] = torch.randperm(self.samples, generator=draws).tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        order = self.order()
        rest = order[self.consumed :]
        missing = -len(rest) % self.ranks
        rest += (order * (missing // len(order) + 1))[:missing] if order else []
        return iter(rest[self.rank :: self.ranks])

    def __len__(self) -> int:
        return -(-max(0, self.samples - self.consumed) // self.ranks)


def leaves_a_batch(batches: BatchSampler, order: ElasticSampler, consumed: int, *, ranks: int) -> bool:
    """Whether so many ranks have a batch to train with in an epoch of which so many samples are consumed. Lightning
    takes an epoch without any for the end of the training."""
    rest = -(-max(0, order.samples - consumed) // ranks)
    return not consumed or rest >= (batches.batch_size if batches.drop_last else 1)
