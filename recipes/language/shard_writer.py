"""Shards from plain text, shuffled, in memory that does not grow with the text. text -> instances -> *shards*.

Every sequence goes to a shard by chance, and each shard is shuffled when it is complete: together that is a shuffle of
the whole. Files get their names when all are done, so what is cut short leaves none behind.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pl_pipe.errors import ConfigError, DataError

from ..extras import needed
from ..preparation.report import Report, Silence
from .instances import KEYS, ROOM, Document, InstanceMaker, InstanceRule, Rows, Tally, joined, row_shape, taken
from .plain_text import read_documents
from .vocabulary import Vocabulary, encode_all, read_vocabulary, train_vocabulary, write_vocabulary

BUFFERED_ROWS = 512
CHUNK_ROWS = 256


@dataclass(frozen=True)
class ShardReport:
    """What was made."""

    paths: tuple[Path, ...]
    tally: Tally


def make_shards(
    texts: Sequence[Path],
    out: Path,
    *,
    vocabulary: Vocabulary,
    rule: InstanceRule,
    shards: int = 16,
    validation_share: float = 0.01,
    seed: int = 0,
    compress: bool = False,
    progress: Callable[[Tally], None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> ShardReport:
    """Writes `train_000.hdf5`, … and `val_000.hdf5` (a share of the documents) into `out`.

    `progress` is told what became of the text so far, `advance` the bytes of each file that has been read.
    """
    check_shares(shards=shards, validation_share=validation_share)
    refuse_present(out)
    if not texts:
        raise DataError("no text files are given; name at least one")
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    maker = InstanceMaker(vocabulary, rule, seed=seed)
    held = _Splitter(read_documents(texts, advance=advance), vocabulary, share=validation_share, seed=seed)
    train = [_Writer(out / f"train_{number:03d}.hdf5", rule, compress=compress) for number in range(shards)]
    val = _Writer(out / "val_000.hdf5", rule, compress=compress)
    try:
        for rows in maker.rows(held.training()):
            where = random.integers(0, shards, len(rows["input_ids"]))
            for number, writer in enumerate(train):
                writer.add(taken(rows, where == number))
            if len(held.validation) >= ROOM:
                val.add_all(maker.rows(held.take_validation()))
            if progress is not None:
                progress(maker.tally)
        val.add_all(maker.rows(held.take_validation()))
        if not maker.tally.sequences:
            raise DataError(f"{', '.join(map(str, texts))}: there is no text in it; give lines of text")
        finished = [writer for writer in [*train, val] if writer.finish(random)]
        if finished == [val]:
            raise DataError(
                f"all {maker.tally.documents} documents were drawn for validation, none is left to train on; give more "
                f"text, or a smaller validation_share than {validation_share}"
            )
        paths = tuple(writer.keep() for writer in finished)
    finally:
        for writer in [*train, val]:
            writer.close()
    return ShardReport(paths, maker.tally)


def check_shares(*, shards: int, validation_share: float) -> None:
    """Before anything is read."""
    if shards < 1 or not 0.0 <= validation_share <= 0.5:
        raise ConfigError(
            f"shards={shards} must be at least 1, validation_share={validation_share} from 0 to 0.5: most of the "
            f"documents are to train on"
        )


def build_shards(
    files: Sequence[Path],
    folder: Path,
    *,
    vocabulary: str | None = None,
    vocabulary_size: int = 30_522,
    vocabulary_documents: int = 1_000_000,
    cased: bool = False,
    sequence_length: int = 128,
    most_masked: int = 20,
    copies: int = 1,
    report: Report | None = None,
    **settings: Any,
) -> Sequence[Path]:
    """The step of `pl-pipe data prepare` after the texts; `settings` are those of `make_shards`.

    Without a `vocabulary` one is learnt from the first documents: counting the words of all would fill the memory.
    """
    report = report or Silence()
    rule = InstanceRule(sequence_length, most_masked, copies=copies)
    refuse_present(folder)
    own = folder / "vocab.txt"
    if vocabulary is not None:
        words = read_vocabulary(vocabulary, lowercase=not cased, setting="prepare.shards.settings.vocabulary=")
        write_vocabulary(words, own)
    else:
        with report.bar(f"learning {vocabulary_size} subwords", None):
            words = own_vocabulary(
                files, own, size=vocabulary_size, lowercase=not cased, documents=vocabulary_documents, quiet=True,
                setting="prepare.shards.settings.vocabulary_size",
            )  # fmt: skip
    with report.bar("making shards", sum(file.stat().st_size for file in files)) as advance:
        made = make_shards(files, folder, vocabulary=words, rule=rule, advance=advance, **settings)
    report.say(f"{len(made.paths)} shards: {made.tally.describe()}")
    return [own, *made.paths]


def own_vocabulary(
    texts: Sequence[Path],
    path: Path,
    *,
    size: int,
    lowercase: bool = True,
    documents: int,
    quiet: bool = False,
    setting: str = "vocabulary_size",
) -> Vocabulary:
    """A vocabulary learnt from the first so many `documents`, also written to `path`; an error names its `setting`."""
    lines = (sentence for document in islice(read_documents(texts), documents) for sentence in document)
    words = train_vocabulary(lines, size=size, lowercase=lowercase, quiet=quiet, setting=setting)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_vocabulary(words, path)
    return words


def refuse_present(out: Path) -> None:
    """A folder with shards in it is left as it is."""
    present = sorted(out.glob("*.hdf5"))
    if present:
        raise DataError(
            f"{out} holds {len(present)} shards already, as {present[0].name}; move them away, or choose another folder"
        )


class _Splitter:
    """Tokenises documents, and keeps a random share of them for validation."""

    def __init__(self, documents: Iterator[list[str]], vocabulary: Vocabulary, *, share: float, seed: int) -> None:
        self._documents, self._tokenizer, self._share = documents, vocabulary.tokenizer(), share
        self._random = np.random.default_rng([seed, 1])
        self.validation: list[Document] = []

    def training(self) -> Iterator[Document]:
        for sentences in self._documents:
            document = encode_all(self._tokenizer, sentences)
            if any(document) and self._random.random() < self._share:
                self.validation.append(document)
            else:
                yield document
        if len(self.validation) == 1:  # alone it has no other document for its second segments
            yield self.validation.pop()

    def take_validation(self) -> list[Document]:
        taken, self.validation = self.validation, []
        return taken


class _Writer:
    """One shard: appended to under a temporary name, then shuffled and renamed."""

    def __init__(self, path: Path, rule: InstanceRule, *, compress: bool) -> None:
        self.path, self._part, self._buffer = path, path.with_suffix(".part"), list[Rows]()
        self._settings: dict[str, Any] = {"compression": "gzip", "compression_opts": 4} if compress else {}
        self._file = needed("h5py").File(self._part, "w")
        for name, kind in KEYS.items():
            inner = row_shape(name, rule)
            self._file.create_dataset(
                name, (0, *inner), kind, maxshape=(None, *inner), chunks=(CHUNK_ROWS, *inner), **self._settings
            )

    def add(self, rows: Rows) -> None:
        self._buffer.append(rows)
        if sum(len(part["input_ids"]) for part in self._buffer) >= BUFFERED_ROWS:
            self._flush()

    def add_all(self, parts: Iterable[Rows]) -> None:
        for rows in parts:
            self.add(rows)

    def finish(self, random: np.random.Generator) -> bool:
        """Shuffles what was added; whether there is any."""
        self._flush()
        rows = len(self._file["input_ids"])
        if rows:
            order = random.permutation(rows)
            for name in KEYS:
                self._file[name][...] = self._file[name][...][order]
        self._file.close()
        return rows > 0

    def keep(self) -> Path:
        """Gives the file its name."""
        self._part.replace(self.path)
        return self.path

    def close(self) -> None:
        """Leaves no file that was not kept."""
        if self._file:
            self._file.close()
        self._part.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._buffer:
            rows, self._buffer = joined(self._buffer), []
            before = len(self._file["input_ids"])
            for name in KEYS:
                self._file[name].resize(before + len(rows[name]), axis=0)
                self._file[name][before:] = rows[name]
