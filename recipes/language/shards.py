"""HDF5 shards of pre-training sequences, read a batch at a time. instances -> *shards* -> loader.

A batch is a stretch of neighbouring rows, which costs one read a key; shards are shuffled when they are made. Files are
opened when a process first reads of them, and only a few stay open, so memory does not grow with the corpus.
"""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler
from typing_extensions import override

from pl_pipe.errors import DataError

from ..extras import needed
from .instances import KEYS, Rows

Batch = dict[str, Tensor]
OPEN_FILES = 4
CHUNK_CACHE_BYTES = 8 << 20  # a key's, in an open file: compressed neighbours are unpacked once
_LIMITS = {"input_mask": 1, "segment_ids": 1, "next_sentence_labels": 1}
"""The greatest value of a key, where it is always the same."""
BLOCK_ROWS = 4096
"""Rows that are read one after the other; blocks come in random order, and so do the batches within."""


class Shards:
    """Several files as one table; what they hold is compared when they are named, not read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        facts = [_facts(path) for path in self.paths]
        for path, (_, widths) in zip(self.paths, facts, strict=True):
            if widths != facts[0][1]:
                raise DataError(
                    f"{path} has rows of other lengths ({_described(widths)}) than {self.paths[0]} "
                    f"({_described(facts[0][1])}); put shards of one make into a folder"
                )
        self.ends = list(accumulate(rows for rows, _ in facts))
        self._open: OrderedDict[int, tuple[Any, dict[str, Any]]] = OrderedDict()
        self._process = os.getpid()

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, first: int, last: int) -> Rows:
        """The rows from `first` up to `last`, from as many files as they lie in."""
        parts: list[Rows] = []
        while first < last:
            shard = bisect_right(self.ends, first)
            before = self.ends[shard] - self._rows(shard)
            until = min(last, self.ends[shard])
            data = self._datasets(shard)
            parts.append({name: data[name][first - before : until - before] for name in KEYS})
            first = until
        return parts[0] if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts]) for name in KEYS}

    def path_of(self, row: int) -> Path:
        return self.paths[bisect_right(self.ends, row)]

    def _rows(self, shard: int) -> int:
        return self.ends[shard] - (self.ends[shard - 1] if shard else 0)

    def _datasets(self, shard: int) -> dict[str, Any]:
        if self._process != os.getpid():  # a loader's worker: the parent's handles are not for it
            self._open, self._process = OrderedDict(), os.getpid()
        if shard not in self._open:
            while len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)[1][0].close()
            file = needed("h5py").File(self.paths[shard], "r", rdcc_nbytes=CHUNK_CACHE_BYTES)
            self._open[shard] = file, {name: file[name] for name in KEYS}
        self._open.move_to_end(shard)
        return self._open[shard][1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


class ShardBatches(Dataset[Batch]):
    """Batch k has rows k·n to (k+1)·n of a stretch of the shards; the last one may be smaller."""

    def __init__(
        self, shards: Shards, *, batch_size: int, vocabulary_size: int, first: int = 0, last: int | None = None
    ) -> None:
        self.shards, self.batch_size, self.vocabulary_size = shards, batch_size, vocabulary_size
        self.first, self.last = first, len(shards) if last is None else last

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.batch_size)

    @override
    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.first + number * self.batch_size
        rows = self.shards.read(start, min(start + self.batch_size, self.last))
        self._check(rows, self.shards.path_of(start))
        rows["next_sentence_labels"] = rows["next_sentence_labels"].reshape(-1)  # some write them as a column
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()}

    def _check(self, rows: Rows, path: Path) -> None:
        """Refuses numbers that the model has no place for: torch would say less, or nothing on some devices."""
        greatest = max(int(rows["input_ids"].max()), int(rows["masked_lm_ids"].max()))
        if greatest >= self.vocabulary_size:
            raise DataError(
                f"{path} holds the token id {greatest}, the vocabulary has {self.vocabulary_size} tokens; set "
                "data.vocabulary to the vocab.txt that the shards were made with, or data.vocabulary_size"
            )
        limits = {**_LIMITS, "masked_lm_positions": rows["input_ids"].shape[1] - 1}
        for name in KEYS:
            least, most = int(rows[name].min()), int(rows[name].max())
            if least < 0 or most > limits.get(name, most):
                wrong = least if least < 0 else most
                until = f"from 0 to {limits[name]}" if name in limits else "from 0 on"
                raise DataError(f"{path} holds {wrong} in {name}, which goes {until}; make the shard anew")


class BlockOrder(DistributedSampler[Batch]):
    """Batches in blocks: random ones, yet each loader process reads stretches of its own.

    A loader deals its indices out to its processes in turn, and data parallel ranks take turns before that. So the
    order has as many lanes as there are such processes: lane k has every k-th place, and blocks of its own.

        blocks shuffled   7 2 | 5 0 | 3 1 …         lane 0 ─► 7, 5, 3 …     place 0, 2, 4 …
        lanes = 2                                   lane 1 ─► 2, 0, 1 …     place 1, 3, 5 …
    """

    def __init__(self, data: ShardBatches, *, replicas: int, rank: int, workers: int, shuffle: bool, seed: int) -> None:
        super().__init__(data, num_replicas=replicas, rank=rank, shuffle=shuffle, seed=seed)
        self.batches, self.lanes = len(data), max(1, workers) * replicas
        self.block = max(1, BLOCK_ROWS // data.batch_size)

    @override
    def __iter__(self) -> Iterator[int]:  # type: ignore[override]
        again = chain.from_iterable(iter(self._order, None))  # ranks get equally many: some batches twice
        return islice(again, self.rank, self.total_size, self.num_replicas)

    def _order(self) -> Iterator[int]:
        random = np.random.default_rng([self.seed, self.epoch])
        blocks = np.arange(-(-self.batches // self.block))
        if self.shuffle:
            random.shuffle(blocks)
        lanes = [self._lane(blocks[lane :: self.lanes], random) for lane in range(self.lanes)]
        while lanes:
            for lane in list(lanes):
                number = next(lane, None)
                if number is None:
                    lanes.remove(lane)
                else:
                    yield number

    def _lane(self, blocks: Any, random: np.random.Generator) -> Iterator[int]:
        for block in blocks.tolist():
            numbers = np.arange(block * self.block, min((block + 1) * self.block, self.batches))
            if self.shuffle:
                random.shuffle(numbers)
            yield from numbers.tolist()


_ALIKE = {"input_ids": ("input_mask", "segment_ids"), "masked_lm_positions": ("masked_lm_ids",)}
"""Keys whose rows are equally long."""


def _facts(path: Path) -> tuple[int, dict[str, int]]:
    """How many rows a file has, and how long each key's are."""
    try:
        with needed("h5py").File(path, "r") as file:
            missing = [name for name in KEYS if name not in file]
            if missing:
                raise DataError(
                    f"{path} has no {', '.join(missing)}; a shard holds {', '.join(KEYS)} (make them by "
                    "python -m pl_pipe.recipes.language.make_shards)"
                )
            groups = [name for name in KEYS if not hasattr(file[name], "shape")]
            if groups:
                raise DataError(f"{path} has {groups[0]} as a group, not as a table of numbers; make it anew")
            strange = [name for name in KEYS if file[name].dtype.kind not in "iub"]
            if strange:
                kind = file[strange[0]].dtype
                raise DataError(f"{path} has {strange[0]} as {kind}, not as whole numbers; make it anew")
            shapes = {name: file[name].shape for name in KEYS}
    except OSError as error:
        raise DataError(f"{path} is no HDF5 file, or is damaged ({error}); fetch or make it anew") from error
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or rows == {0}:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise DataError(f"{path} is empty, or its keys have different numbers of rows ({found}); make it anew")
    widths = {name: int(shape[1]) if len(shape) > 1 else 1 for name, shape in shapes.items()}
    for one, others in _ALIKE.items():
        for other in others:
            if widths[one] != widths[other]:
                raise DataError(
                    f"{path} has rows of {widths[one]} {one} and {widths[other]} {other}, which must be as many; make "
                    f"it anew"
                )
    return int(rows.pop()), widths


def _described(widths: dict[str, int]) -> str:
    return f"{widths['input_ids']} tokens, {widths['masked_lm_positions']} masked"
