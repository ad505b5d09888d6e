"""The data module of all parallel text: corpora and a vocabulary become loaders of bucketed batches."""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from pl_pipe.callbacks.replicas import data_share
from pl_pipe.errors import CheckpointError, ConfigError, DataError
from pl_pipe.log import get_logger

from ..cache import cache_folder
from ..loading import require_least
from ..progress import counting
from .batches import BucketSampler, Collate
from .corpus import Corpus
from .encoded import EncodedPairs, encode, read_encoded, report_left_out
from .vocabulary import SubwordVocabulary, Vocabulary, fingerprint, read_vocabulary, vocabulary_of, write_vocabulary

log = get_logger(__name__)

_SPLITS_OF = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test",)}


class TranslationData(L.LightningDataModule):
    """Corpora by split (`train`, `val`, `test`; some may be absent) in one shared subword vocabulary.

    The vocabulary is read from a file, or trained on the training corpus once and kept in the cache. It travels in
    every checkpoint: one that is loaded brings it along, or is refused if it was trained with another.
    """

    def __init__(
        self,
        corpora: Mapping[str, Corpus],
        *,
        vocabulary: str | None = None,
        vocabulary_size: int = 8_000,
        vocabulary_lines: int = 1_000_000,
        max_length: int = 50,
        batch_size: int = 64,
        length_multiple: int = 8,
        num_workers: int = 0,
        order_seed: int = 0,
        cache: str | None = None,
        keep_vocabulary_in: str | None = None,
    ) -> None:
        super().__init__()
        require_least(
            max_length=(max_length, 1), batch_size=(batch_size, 1), length_multiple=(length_multiple, 1),
            vocabulary_lines=(vocabulary_lines, 1), num_workers=(num_workers, 0), order_seed=(order_seed, 0),
        )  # fmt: skip
        self.corpora = dict(corpora)
        self.vocabulary_size = vocabulary_size
        self.batch_size = batch_size
        self.max_length = max_length
        self.length_multiple = length_multiple
        self.num_workers = num_workers
        self.order_seed = order_seed
        self._vocabulary_lines = vocabulary_lines
        self._cache = cache_folder("translation") if cache is None else Path(cache).expanduser()
        self._keep_in = None if keep_vocabulary_in is None else Path(keep_vocabulary_in)
        self._file = None if vocabulary is None else Path(vocabulary).expanduser()
        self._vocabulary: Vocabulary | None = None
        self._encoded: dict[str, EncodedPairs] = {}

    @property
    def vocabulary(self) -> Vocabulary:
        """Known after `setup`, or once a checkpoint has brought it."""
        if self._vocabulary is None:
            self._vocabulary = self._checked(self._read_vocabulary())
        return self._vocabulary

    @override
    def prepare_data(self) -> None:
        """Trains the vocabulary and encodes what the trainer is about to read, unless both lie in the cache."""
        if self._waits_for_checkpoint:
            return
        if self._vocabulary is None and self._file is None and not self._trained_file().is_file():
            self._train_vocabulary()
        doing = None if self.trainer is None else self.trainer.state.fn
        for split in () if doing is None else _SPLITS_OF[doing.value]:
            if split in self.corpora:
                self._encode(split)

    @override
    def setup(self, stage: str) -> None:
        """Maps what the trainer will read. Without a trainer, who asks for a loader has it made."""
        if stage == "fit" and "val" not in self.corpora and (self.trainer is None or self.trainer.is_global_zero):
            log.warning("there is no val corpus: training goes without validation, and without a best checkpoint")
        for split in () if self.trainer is None or self._waits_for_checkpoint else _SPLITS_OF[stage]:
            if split in self.corpora:
                self._of(split)

    @property
    def _waits_for_checkpoint(self) -> bool:
        """Whether only a checkpoint can bring the vocabulary, which Lightning loads after `setup`."""
        return self._vocabulary is None and self._file is None and "train" not in self.corpora

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        pairs = self._of("train")
        replicas, rank = data_share(self.trainer)
        sampler = BucketSampler(
            pairs,
            batch_size=self.batch_size,
            multiple=self.length_multiple,
            seed=self.order_seed,
            num_replicas=replicas,
            rank=rank,
        )
        return self._loader(pairs, sampler)

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        fitting = self.trainer is not None and self.trainer.state.fn is TrainerFn.FITTING
        if fitting and "val" not in self.corpora:
            return []  # how Lightning is told that there is no validation
        return self._loader(self._of("val"), None)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader(self._of("test"), None)

    predict_dataloader = test_dataloader

    def _loader(self, pairs: EncodedPairs, sampler: BucketSampler | None) -> DataLoader[Any]:
        return DataLoader(
            pairs,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            sampler=sampler,
            collate_fn=Collate(self.length_multiple),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """The vocabulary, for the checkpoint that is being saved; a file of its own stands beside the first one."""
        text = self.vocabulary.text()
        if self._keep_in is not None and (self.trainer is None or self.trainer.is_global_zero):
            file = self._keep_in / ("vocabulary.json" if text.startswith("{") else "vocabulary.txt")
            if not file.exists():
                write_vocabulary(self.vocabulary, file)
        return {"vocabulary": text}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs = vocabulary_of(state_dict["vocabulary"], where="the checkpoint's vocabulary")
        if self._vocabulary is None and self._file is None:
            self._vocabulary = self._checked(theirs)
        elif fingerprint(self.vocabulary) != fingerprint(theirs):
            raise CheckpointError(
                f"the checkpoint was trained with another vocabulary ({theirs.size} tokens, {fingerprint(theirs)}) "
                f"than the data's ({self.vocabulary.size} tokens, {fingerprint(self.vocabulary)}): ids would mean "
                f"other words; give data.vocabulary=<vocabulary.json of the run>, or the corpus it was trained on"
            )

    def _of(self, split: str) -> EncodedPairs:
        if split not in self.corpora:
            others = ", or by data.source and data.reference" if split == "test" else ""
            raise DataError(
                f"the data set has no {split} corpus; name its files by data.{split}{others} (docs/translation.md)"
            )
        if split not in self._encoded:
            self._encoded[split], facts = read_encoded(self._encode(split))
            if self.trainer is None or self.trainer.is_global_zero:
                report_left_out(facts, self.corpora[split], max_length=self.max_length)
        return self._encoded[split]

    def _encode(self, split: str) -> Path:
        corpus = self.corpora[split]
        with counting(f"encoding {corpus.name}", "pairs") as progress:
            return encode(
                corpus, self.vocabulary, max_length=self.max_length, cache=self._cache / "encoded", progress=progress
            )

    def _checked(self, vocabulary: Vocabulary) -> Vocabulary:
        if vocabulary.size > self.vocabulary_size:
            raise ConfigError(
                f"the vocabulary has {vocabulary.size} tokens, but data.vocabulary_size={self.vocabulary_size}; "
                f"set data.vocabulary_size={vocabulary.size}"
            )
        return vocabulary

    def _read_vocabulary(self) -> Vocabulary:
        if self._file is not None:
            return read_vocabulary(self._file)
        if not self._trained_file().is_file():
            self._train_vocabulary()  # without a trainer nobody has called prepare_data
        return read_vocabulary(self._trained_file())

    def _trained_file(self) -> Path:
        if "train" not in self.corpora:
            raise DataError(
                "there is neither a vocabulary nor a training corpus to make one of; give data.vocabulary=<file>, the "
                "training files, or a checkpoint, which brings its own"
            )
        name = f"{self.corpora['train'].fingerprint}-{self.vocabulary_size}-{self._vocabulary_lines}.json"
        return self._cache / "vocabularies" / name

    def _train_vocabulary(self) -> None:
        file = self._trained_file()
        corpus = self.corpora["train"]
        with counting(f"learning {self.vocabulary_size} subwords of {corpus.name}", "pairs") as progress:

            def lines() -> Iterator[str]:
                for number, pair in enumerate(islice(corpus.pairs(), self._vocabulary_lines)):
                    if number % 10_000 == 0:
                        progress(number)
                    yield from pair

            trained = SubwordVocabulary.trained(lines(), size=self.vocabulary_size)
        write_vocabulary(trained, file)
