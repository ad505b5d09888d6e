"""Batches of sentences of like length, padded to a few lengths only. encoded pairs -> *batches* -> training step.

A pipeline looks at each new shape of a batch once (docs/pipeline.md), and padding is computed for nothing. So sentences
of like length stand together, and lengths are rounded up to a multiple. The order is drawn in pools: blocks of
neighbouring sentences from all over the corpus, enough of them to sort, never the whole corpus.
"""

# N sentences, S source positions, T target positions

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override

from .encoded import EncodedPairs, Ids
from .special_ids import BEGIN, END, PAD

_BLOCK_SENTENCES = 256
_POOL_BLOCKS = 256


class BucketSampler(DistributedSampler[Any]):
    """Numbers of sentences such that every `batch_size` of them in a row have like lengths; another order every epoch.

    The order follows from `seed` and the epoch alone, so that all ranks agree on it and a resumed run goes on with it.
    Of several ranks, each gets its share of every chunk; a short last one is filled up with sentences that came before.
    (Lightning would shuffle what any sampler but a DistributedSampler has sorted.)
    """

    def __init__(
        self, pairs: EncodedPairs, *, batch_size: int, multiple: int, seed: int, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(pairs, num_replicas=num_replicas, rank=rank, seed=seed)  # type: ignore[arg-type]
        self._pairs, self._multiple = pairs, multiple
        self._chunk = batch_size * num_replicas

    @override
    def __iter__(self) -> Iterator[int]:
        draw = np.random.default_rng((self.seed, self.epoch))
        blocks = draw.permutation(-(-len(self._pairs) // _BLOCK_SENTENCES))
        left = np.empty(0, np.int64)
        first: Ids | None = None
        for start in range(0, len(blocks), _POOL_BLOCKS):
            chosen = blocks[start : start + _POOL_BLOCKS]
            pool = np.concatenate([left, *(self._block(int(block)) for block in chosen)])
            draw.shuffle(pool)
            whole = len(pool) - len(pool) % self._chunk
            pool, left = pool[:whole], pool[whole:]  # what does not fill a chunk waits for the next pool
            source, target = (-(-(lengths + 1) // self._multiple) for lengths in self._pairs.lengths(pool))
            chunks = pool[np.lexsort((target, source))].reshape(-1, self._chunk)
            for number in draw.permutation(len(chunks)):
                first = chunks[number] if first is None else first
                yield from chunks[number][self.rank :: self.num_replicas].tolist()
        lacking = -len(left) % self.num_replicas
        if lacking:
            source_of = left if first is None else first
            left = np.concatenate([left, np.resize(source_of, lacking)])
        yield from left[self.rank :: self.num_replicas].tolist()

    def _block(self, block: int) -> Ids:
        begin = block * _BLOCK_SENTENCES
        return np.arange(begin, min(begin + _BLOCK_SENTENCES, len(self._pairs)))


class Collate:
    """Sentences to tensors: sources end with `END`, targets stand between `BEGIN` and `END`."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple

    def __call__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Tensor, Tensor, Tensor]:
        """Source [N, S], its lengths [N], target [N, T + 1]: S and T are multiples."""
        source_length = self._rounded(max(len(source) for source, _ in pairs) + 1)
        target_length = self._rounded(max(len(target) for _, target in pairs) + 1) + 1
        source_NS = np.full((len(pairs), source_length), PAD, np.int64)
        target_NT = np.full((len(pairs), target_length), PAD, np.int64)
        target_NT[:, 0] = BEGIN
        lengths_N = np.empty(len(pairs), np.int64)
        for row, (source, target) in enumerate(pairs):
            end = len(source)
            source_NS[row, :end] = source
            source_NS[row, end] = END
            lengths_N[row] = end + 1
            end = len(target) + 1
            target_NT[row, 1:end] = target
            target_NT[row, end] = END
        return torch.from_numpy(source_NS), torch.from_numpy(lengths_N), torch.from_numpy(target_NT)

    def _rounded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple
