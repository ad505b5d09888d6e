"""Pre-training sequences from documents. sentences -> *instances* -> shards or memory. Devlin et al., 2018, 3.1.

A sequence is `[CLS] first [SEP] second [SEP]`, where the second segment follows the first in its document or, half of
the time, comes from another one; 15 % of its words are masked. The result has the six arrays of the HDF5 files that are
in wide use; no torch in here.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pl_pipe.errors import ConfigError, DataError

from .vocabulary import CLASS, MASK, SEPARATOR, SPECIAL, Vocabulary

Document = list[list[int]]
"""The token ids of each sentence."""
Rows = dict[str, npt.NDArray[Any]]
"""One array a key, all with as many rows."""

Pair = tuple[list[int], list[int], bool]
"""Two segments, and whether the second is from elsewhere."""

KEYS: dict[str, str] = {
    "input_ids": "i4",
    "input_mask": "i1",
    "segment_ids": "i1",
    "masked_lm_positions": "i4",
    "masked_lm_ids": "i4",
    "next_sentence_labels": "i1",
}
"""What a shard holds, and how it is written."""
ROOM = 256
"""Documents that are at hand at a time; a random second segment comes from one of them."""
WAY_TO_MASK = (0.8, 0.9)  # below the first: [MASK]; below the second: the word itself; else any word


@dataclass(frozen=True)
class InstanceRule:
    """How sequences are cut and masked."""

    sequence_length: int = 128
    most_masked: int = 20
    masked_share: float = 0.15
    short_share: float = 0.1
    """Of the sequences, so many are shorter than they could be."""
    copies: int = 1
    """How often each document is used, with other cuts and masks."""

    def __post_init__(self) -> None:
        if self.sequence_length < 8 or self.most_masked < 1 or self.copies < 1:
            raise ConfigError(
                f"sequence_length={self.sequence_length} must be at least 8, most_masked={self.most_masked} and "
                f"copies={self.copies} at least 1"
            )
        if not 0.0 < self.masked_share < 1.0 or not 0.0 <= self.short_share <= 1.0:
            raise ConfigError(
                f"masked_share={self.masked_share} must be within 0 and 1, short_share={self.short_share} from 0 to 1"
            )


@dataclass
class Tally:
    """What became of the text."""

    documents: int = 0
    sentences: int = 0
    sequences: int = 0
    split_sentences: int = 0
    """Sentences longer than a sequence, which were cut into pieces; nothing of them is lost."""
    cut_tokens: int = 0
    """Tokens left out because two segments together were longer than a sequence."""

    def describe(self) -> str:
        return (
            f"{self.documents:,} documents, {self.sentences:,} sentences, {self.sequences:,} sequences; "
            f"{self.split_sentences:,} sentences were longer than a sequence and were divided, "
            f"{self.cut_tokens:,} tokens were left out of sequences that were full"
        )


@dataclass
class InstanceMaker:
    """Turns documents into rows, a room of documents at a time, so that memory does not grow with the text."""

    vocabulary: Vocabulary
    rule: InstanceRule
    seed: int = 0
    tally: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        ids = self.vocabulary.ids
        self._random = np.random.default_rng(self.seed)
        self._class, self._separator, self._mask = ids[CLASS], ids[SEPARATOR], ids[MASK]
        special = {ids[token] for token in SPECIAL}
        self._words = np.array([number for number in range(len(self.vocabulary)) if number not in special])

    def rows(self, documents: Iterable[Document]) -> Iterator[Rows]:
        """Rows of one room of documents after the other."""
        room: list[Document] = []
        carried: Document | None = None
        for document in documents:
            sentences = self._within_limit(document)
            if not sentences:
                continue
            self.tally.documents += 1
            room.append(sentences)
            if len(room) == ROOM:
                yield self._of_room(room, carried)
                carried, room = room[-1], []
        if room:
            yield self._of_room(room, carried)

    def _within_limit(self, document: Document) -> Document:
        most = self.rule.sequence_length - 3
        sentences: Document = []
        for sentence in document:
            self.tally.sentences += bool(sentence)
            self.tally.split_sentences += len(sentence) > most
            sentences += [sentence[start : start + most] for start in range(0, len(sentence), most)]
        return sentences

    def _of_room(self, room: list[Document], carried: Document | None) -> Rows:
        known = room if carried is None else [*room, carried]
        if len(known) < 2:
            raise DataError(
                "the text has one document only, so no second segment can come from another one; separate documents "
                "by an empty line"
            )
        pairs = [
            pair
            for _ in range(self.rule.copies)
            for place, document in enumerate(room)
            for pair in self._pairs(document, place, known)
        ]
        self.tally.sequences += len(pairs)
        rows = empty_rows(len(pairs), self.rule)
        for place, (first, second, elsewhere) in enumerate(pairs):
            self._fill(rows, place, first, second, elsewhere)
        return rows

    def _pairs(self, document: Document, place: int, known: list[Document]) -> Iterator[Pair]:
        random, most = self._random, self.rule.sequence_length - 3
        at = 0
        while at < len(document):
            target = int(random.integers(2, most + 1)) if random.random() < self.rule.short_share else most
            taken, length = 0, 0
            while at + taken < len(document) and length < target:
                length += len(document[at + taken])
                taken += 1
            cut = at + (int(random.integers(1, taken)) if taken > 1 else 1)
            first = [token for sentence in document[at:cut] for token in sentence]
            elsewhere = taken == 1 or random.random() < 0.5
            if elsewhere:
                other = int(random.integers(0, len(known) - 1))
                second = self._stretch(known[other + (other >= place)], target - len(first))
                at = cut  # what was not used is the next sequence's
            else:
                second = [token for sentence in document[cut : at + taken] for token in sentence]
                at += taken
            self.tally.cut_tokens += self._truncate(first, second, most)
            yield first, second, elsewhere

    def _stretch(self, document: Document, wanted: int) -> list[int]:
        """Sentences from a random place on, until there are enough tokens."""
        found: list[int] = []
        for sentence in document[int(self._random.integers(0, len(document))) :]:
            found += sentence
            if len(found) >= wanted:
                break
        return found

    def _truncate(self, first: list[int], second: list[int], most: int) -> int:
        """Cuts the longer one, at either end by chance; returns how many tokens went."""
        gone = max(0, len(first) + len(second) - most)
        for _ in range(gone):
            longer = first if len(first) > len(second) else second
            longer.pop(0 if self._random.random() < 0.5 else -1)
        return gone

    def _fill(self, rows: Rows, place: int, first: Sequence[int], second: Sequence[int], elsewhere: bool) -> None:
        tokens = np.array([self._class, *first, self._separator, *second, self._separator])
        candidates = np.flatnonzero((tokens != self._class) & (tokens != self._separator))
        count = min(self.rule.most_masked, max(1, round(len(tokens) * self.rule.masked_share)), len(candidates))
        positions = np.sort(self._random.permutation(candidates)[:count])
        rows["masked_lm_positions"][place, :count] = positions
        rows["masked_lm_ids"][place, :count] = tokens[positions]
        way = self._random.random(count)
        any_word = self._words[self._random.integers(0, len(self._words), count)]
        replaced = np.where(way < WAY_TO_MASK[1], tokens[positions], any_word)
        tokens[positions] = np.where(way < WAY_TO_MASK[0], self._mask, replaced)
        rows["input_ids"][place, : len(tokens)] = tokens
        rows["input_mask"][place, : len(tokens)] = 1
        rows["segment_ids"][place, len(first) + 2 : len(tokens)] = 1
        rows["next_sentence_labels"][place] = elsewhere


def empty_rows(count: int, rule: InstanceRule) -> Rows:
    return {name: np.zeros((count, *row_shape(name, rule)), kind) for name, kind in KEYS.items()}


def row_shape(key: str, rule: InstanceRule) -> tuple[int, ...]:
    """Of one sequence's entry."""
    if key == "next_sentence_labels":
        return ()
    return (rule.most_masked if key.startswith("masked_lm") else rule.sequence_length,)


def joined(parts: Sequence[Rows]) -> Rows:
    return {name: np.concatenate([part[name] for part in parts]) for name in KEYS}


def taken(rows: Rows, index: npt.NDArray[Any] | slice) -> Rows:
    return {name: values[index] for name, values in rows.items()}
