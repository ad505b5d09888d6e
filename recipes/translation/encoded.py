"""A corpus as ids on disk, mapped into memory: corpora larger than memory are shuffled and read like small ones.

    corpus ─ encode, once, in blocks ─►  <cache>/<key>/{source,target}.{ids,ends}, facts.json  ─►  EncodedPairs

Only what a batch touches is read; the operating system keeps or drops the rest as it sees fit.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pl_pipe.errors import DataError
from pl_pipe.log import get_logger

from .corpus import Corpus, Pair
from .special_ids import UNKNOWN
from .vocabulary import Vocabulary, fingerprint

log = get_logger(__name__)

_LAYOUT = 2  # in the names of folders, so that none of an older make is read
_BLOCK = 8192  # lines encoded at a time
_SIDES = ("source", "target")
_MANY_UNKNOWN = 0.01  # share of tokens; files and the list that belongs to them have hardly any

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EncodingFacts:
    """What became of a corpus."""

    pairs: int
    too_long: int
    """Pairs left out because a side has more tokens than the limit."""
    empty: int
    """Pairs left out because a side has no text."""
    dtype: str
    tokens: int
    """Of the pairs that were kept, both sides."""
    unknown: int
    """Tokens that the vocabulary does not have."""

    @property
    def read(self) -> int:
        return self.pairs + self.too_long + self.empty


@dataclass(frozen=True)
class EncodedPairs:
    """Sentence pairs by number; a data set for torch's loaders, which ask for whole batches (`__getitems__`)."""

    ids: tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]
    ends: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
    """Where each sentence's ids end; the first entry is 0."""

    def __len__(self) -> int:
        return len(self.ends[0]) - 1

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
        source, target = (ids[ends[index] : ends[index + 1]] for ids, ends in zip(self.ids, self.ends, strict=True))
        return source, target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]]:
        """Sentences in the order of `indices`, all limits looked up at once."""
        numbers = np.asarray(indices)
        found = []
        for ids, ends in zip(self.ids, self.ends, strict=True):
            begin, end = ends[numbers].tolist(), ends[numbers + 1].tolist()
            found.append([ids[a:b] for a, b in zip(begin, end, strict=True)])
        return list(zip(*found, strict=True))

    def lengths(self, numbers: Ids) -> tuple[Ids, Ids]:
        """Tokens of sources and targets."""
        source, target = (ends[numbers + 1] - ends[numbers] for ends in self.ends)
        return source, target


def encode(
    corpus: Corpus,
    vocabulary: Vocabulary,
    *,
    max_length: int,
    cache: Path,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """The folder that holds the encoded corpus, made if it is not there; `progress` is told of pairs read."""
    folder = cache / f"{corpus.fingerprint}-{fingerprint(vocabulary)}-{max_length}-{_LAYOUT}"
    if (folder / "facts.json").is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".encoding-"))
    try:
        facts = _write(corpus, vocabulary, max_length, temporary, progress)
        if not facts.pairs:
            raise DataError(
                f"{corpus.name} hold no pair to train with: of {facts.read}, {facts.too_long} are longer than "
                f"data.max_length={max_length} tokens and {facts.empty} have an empty line"
            )
        (temporary / "facts.json").write_text(json.dumps(asdict(facts)))
        try:
            temporary.rename(folder)
        except OSError:
            if not (folder / "facts.json").is_file():  # else another process was quicker, and made the same
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def read_encoded(folder: Path) -> tuple[EncodedPairs, EncodingFacts]:
    facts = EncodingFacts(**json.loads((folder / "facts.json").read_text()))
    ids, ends = [], []
    for side in _SIDES:
        ids.append(np.memmap(folder / f"{side}.ids", dtype=facts.dtype, mode="r"))
        ends.append(np.memmap(folder / f"{side}.ends", dtype=np.int64, mode="r"))
    return EncodedPairs((ids[0], ids[1]), (ends[0], ends[1])), facts


def _write(
    corpus: Corpus, vocabulary: Vocabulary, max_length: int, folder: Path, progress: Callable[[int], None] | None
) -> EncodingFacts:
    dtype = np.dtype(np.uint16 if vocabulary.size <= 1 << 16 else np.int32)
    pairs = too_long = empty = read = unknown = 0
    last = [0, 0]
    ids_files = [(folder / f"{side}.ids").open("wb") for side in _SIDES]
    ends_files = [(folder / f"{side}.ends").open("wb") for side in _SIDES]
    try:
        for file in ends_files:
            file.write(np.zeros(1, np.int64).tobytes())
        for block in _blocks(corpus.pairs()):
            read += len(block)
            written = [(left, right) for left, right in block if left.strip() and right.strip()]
            empty += len(block) - len(written)
            encoded = [vocabulary.encode([pair[side] for pair in written]) for side in range(2)]
            kept = [
                number
                for number, (left, right) in enumerate(zip(*encoded, strict=True))
                if len(left) <= max_length and len(right) <= max_length
            ]
            too_long += len(written) - len(kept)
            pairs += len(kept)
            for side in range(2):
                sentences = [encoded[side][number] for number in kept]
                ends = np.cumsum([len(sentence) for sentence in sentences], dtype=np.int64) + last[side]
                flat = np.array([token for sentence in sentences for token in sentence], dtype=dtype)
                unknown += int((flat == UNKNOWN).sum())
                ids_files[side].write(flat.tobytes())
                ends_files[side].write(ends.tobytes())
                last[side] = int(ends[-1]) if len(ends) else last[side]
            if progress is not None:
                progress(read)
    finally:
        for file in (*ids_files, *ends_files):
            file.close()
    return EncodingFacts(pairs, too_long, empty, str(dtype), tokens=sum(last), unknown=unknown)


def report_left_out(facts: EncodingFacts, corpus: Corpus, *, max_length: int) -> None:
    """Says how many pairs are not trained on, and why; also whether the vocabulary may be another text's."""
    total = facts.read
    if facts.too_long:
        log.warning(
            "%d of %d pairs (%.2f %%) of %s have more than data.max_length=%d tokens and are left out",
            facts.too_long, total, 100 * facts.too_long / total, corpus.name, max_length,
        )  # fmt: skip
    if facts.empty:
        log.warning("%d of %d pairs of %s have an empty line and are left out", facts.empty, total, corpus.name)
    if facts.unknown > _MANY_UNKNOWN * facts.tokens:
        log.warning(
            "%.1f %% of the tokens of %s are not in the vocabulary; is data.vocabulary the list of these files?",
            100 * facts.unknown / facts.tokens, corpus.name,
        )  # fmt: skip


def _blocks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    while block := list(islice(pairs, _BLOCK)):
        yield block
