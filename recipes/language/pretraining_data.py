"""Data for BERT's pre-training: HDF5 shards on disk, and the embedded made-up language."""

import re
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from pl_pipe.callbacks.replicas import data_share
from pl_pipe.errors import ConfigError, DataError

from ..loading import SplitData, require_least
from .instances import InstanceMaker, InstanceRule, joined
from .samples import Sample, Samples
from .shards import BlockOrder, ShardBatches, Shards
from .synthetic_corpus import documents
from .vocabulary import encode_all, read_vocabulary

_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|dev|test)([^a-z]|$)")
HOLDS = "HDF5 shards (*.hdf5 or *.h5)"


class WikiData(SplitData):
    """Every shard under `root`; those with `val`, `dev` or `test` in their path validate, else a share of all rows."""

    def __init__(
        self,
        *,
        root: str | None,
        vocabulary: str | None = None,
        vocabulary_size: int | None = 30522,
        batch_size: int = 64,
        num_workers: int = 2,
        val_share: float = 0.01,
        seed: int = 1,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        if not 0.0 < val_share < 1.0:
            raise ConfigError(f"data.val_share={val_share} is no share; choose one between 0 and 1")
        if vocabulary is None and vocabulary_size is None:
            raise ConfigError("data.vocabulary and data.vocabulary_size are both null; set one of them")
        paths = shard_paths(root)
        held = [path for path in paths if _HELD_OUT.search(str(path.relative_to(Path(str(root)).expanduser())).lower())]
        kept = [path for path in paths if path not in held]
        if not kept:
            raise DataError(
                f"data.root={root} has shards for validation only ({held[0].name}, …); add some to train on"
            )
        self.shards, self.held_shards = Shards(kept), Shards(held) if held else None
        self.val_share, self.seed = val_share, seed
        self.vocabulary_size = vocabulary_size if vocabulary is None else len(read_vocabulary(vocabulary))

    @override
    def setup(self, stage: str) -> None:
        if self.held_shards is not None:
            self.train_set = self._batches(self.shards)
            self.val_set = self.test_set = self._batches(self.held_shards)
            return
        cut = len(self.shards) - max(1, round(len(self.shards) * self.val_share))
        if cut < 1:
            raise DataError(f"the shards have {len(self.shards)} row; training and validation need at least two")
        self.train_set = self._batches(self.shards, last=cut)
        self.val_set = self.test_set = self._batches(self.shards, first=cut)

    def _batches(self, shards: Shards, *, first: int = 0, last: int | None = None) -> ShardBatches:
        assert self.vocabulary_size is not None
        return ShardBatches(
            shards, batch_size=self.batch_size, vocabulary_size=self.vocabulary_size, first=first, last=last
        )

    @override
    def _loader(self, dataset: object, *, shuffle: bool = False) -> DataLoader[Sample]:
        assert isinstance(dataset, ShardBatches)
        replicas, rank = data_share(self.trainer)
        order = BlockOrder(
            dataset, replicas=replicas, rank=rank, workers=self.num_workers, shuffle=shuffle, seed=self.seed
        )
        return DataLoader(
            dataset,
            batch_size=None,  # the data set gives whole batches
            sampler=order,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


def shard_paths(root: str | None) -> list[Path]:
    if root is None:
        raise DataError(f"data=wiki reads files from disk; set data.root to the folder that holds {HOLDS}")
    folder = Path(root).expanduser()
    if not folder.is_dir():
        fact = "is not a folder" if folder.exists() else "does not exist"
        raise DataError(f"data.root={root} {fact}; set data.root to the folder that holds {HOLDS}")
    paths = sorted(path for path in folder.rglob("*") if path.suffix in (".hdf5", ".h5"))
    if not paths:
        raise DataError(
            f"data.root={root} holds no {HOLDS}; make them by python -m pl_pipe.recipes.language.make_shards"
        )
    return paths


class SyntheticText(SplitData):
    """The made-up language of `synthetic_corpus.py`, through the same steps as a text from which shards are made."""

    def __init__(
        self,
        *,
        sequence_length: int = 32,
        most_masked: int = 5,
        num_documents: int = 512,
        num_val_documents: int = 64,
        batch_size: int = 32,
        num_workers: int = 0,
        seed: int = 0,
        vocabulary: str | None = None,
        vocabulary_size: int | None = None,
    ) -> None:
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        require_least(num_documents=(num_documents, 2), num_val_documents=(num_val_documents, 2))
        if vocabulary is not None or vocabulary_size is not None:
            raise ConfigError("data=synthetic_text has a vocabulary of its own; leave data.vocabulary null")
        self.rule = InstanceRule(sequence_length, most_masked)
        self.num_documents, self.num_val_documents, self.seed = num_documents, num_val_documents, seed

    @override
    def setup(self, stage: str) -> None:
        counts = (self.num_documents, self.num_val_documents, self.num_val_documents)
        self.train_set, self.val_set, self.test_set = (
            self._samples(count, seed=3 * self.seed + split) for split, count in enumerate(counts)
        )

    def _samples(self, count: int, *, seed: int) -> Samples:
        vocabulary = read_vocabulary(None)
        tokenizer = vocabulary.tokenizer()
        maker = InstanceMaker(vocabulary, self.rule, seed=seed)
        rows = joined(list(maker.rows(encode_all(tokenizer, text) for text in documents(count, seed=seed))))
        return Samples({name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()})
