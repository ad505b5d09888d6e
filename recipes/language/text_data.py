"""Text files for language models: the embedded prose, WikiText's files, or any file of one's own."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from pl_pipe.errors import CheckpointError, ConfigError, DataError

from ..loading import SplitData, require_least
from ..text_file import lines_of
from .token_file import (
    Part,
    Tokens,
    count_tokens,
    digest_of,
    frequent_tokens,
    numbered,
    read_tokens,
    text_of,
    tokens_of,
    write_tokens,
)

Pair = tuple[Tensor, Tensor]
PROSE = Path(__file__).parent / "embedded" / "prose.txt"
"""Openings of Alice's Adventures in Wonderland, Pride and Prejudice, A Tale of Two Cities, Moby-Dick and of the
Gettysburg Address, all in the public domain."""
LAYOUTS = (
    ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
    ("train.txt", "valid.txt", "test.txt"),
)
SHARES = (0.9, 0.95)  # of one file's lines, where training and where validation end


def as_it_is(batch: Pair) -> Pair:
    return batch


class LanguageModelText(SplitData):
    """Sequences of neighbouring tokens, each with the same one token later.

    The list of tokens travels in every checkpoint: one that was trained with another is refused.
    """

    collate_fn = staticmethod(as_it_is)

    def __init__(
        self,
        *,
        root: str | None = None,
        unit: str = "word",
        vocabulary_size: int = 33278,
        sequence_length: int = 32,
        batch_size: int = 32,
        num_workers: int = 0,
        vocabulary: str | None = None,
        keep_vocabulary_in: str | None = None,
    ) -> None:
        """`vocabulary` is a file of tokens, one a line, instead of the training part's; a copy is kept where told."""
        super().__init__(batch_size=batch_size, num_workers=num_workers)
        require_least(sequence_length=(sequence_length, 1))
        count_tokens([], unit=unit, size=vocabulary_size)  # refuses what makes no sense before a long text is read
        self.unit, self.vocabulary_size, self.sequence_length = unit, vocabulary_size, sequence_length
        self.parts = find_parts(root)
        self._given = None if vocabulary is None else self._checked(read_tokens(Path(vocabulary).expanduser()))
        self._keep_in = None if keep_vocabulary_in is None else Path(keep_vocabulary_in)

    @cached_property
    def vocabulary(self) -> list[str]:
        """Tokens by number."""
        return self._given or frequent_tokens(self.parts[0], unit=self.unit, size=self.vocabulary_size)

    @override
    def prepare_data(self) -> None:
        for part in self.parts:
            self._tokens(part)

    @override
    def setup(self, stage: str) -> None:
        train, val, test = (
            Sequences(self._tokens(part), length=self.sequence_length, path=part.path) for part in self.parts
        )
        self.train_set, self.val_set, self.test_set = train, val, test

    def _tokens(self, part: Part) -> Tokens:
        return numbered(part, self.vocabulary, unit=self.unit)

    def _checked(self, vocabulary: list[str]) -> list[str]:
        if len(vocabulary) > self.vocabulary_size:
            raise ConfigError(
                f"data.vocabulary has {len(vocabulary)} tokens, but data.vocabulary_size={self.vocabulary_size}; set "
                f"data.vocabulary_size={len(vocabulary)}"
            )
        return vocabulary

    @override
    def state_dict(self) -> dict[str, Any]:
        """The vocabulary, for the checkpoint that is being saved; a file of its own stands beside the first one."""
        if self._keep_in is not None and (self.trainer is None or self.trainer.is_global_zero):
            file = self._keep_in / "vocabulary.txt"
            if not file.exists():
                write_tokens(self.vocabulary, file)
        return {"vocabulary": text_of(self.vocabulary)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs = tokens_of(state_dict["vocabulary"])
        if theirs != self.vocabulary:
            raise CheckpointError(
                f"the checkpoint was trained with another vocabulary ({len(theirs)} tokens, {digest_of(theirs)}) than "
                f"the text's ({len(self.vocabulary)} tokens, {digest_of(self.vocabulary)}): numbers would mean other "
                f"words; give data.vocabulary=<vocabulary.txt of the run>, or the text it was trained on"
            )


class Sequences(Dataset[Pair]):
    """Stretches of one row of tokens; what is left at its end, shorter than a stretch, is not used."""

    def __init__(self, tokens: Tokens, *, length: int, path: Path) -> None:
        self.tokens, self.length = tokens, length
        if len(self) < 1:
            raise DataError(
                f"{path} (or its part) has {len(tokens)} tokens, a sequence needs {length + 1}; give more text or "
                "shorten data.sequence_length"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    @override
    def __getitem__(self, index: int) -> Pair:
        tokens, following = self.__getitems__([index])
        return tokens[0], following[0]

    def __getitems__(self, indices: Sequence[int]) -> Pair:
        """A whole batch at once, which torch's loaders ask for."""
        where = np.asarray(indices)[:, None] * self.length + np.arange(self.length + 1)
        found = torch.from_numpy(self.tokens[where].astype(np.int64))
        return found[:, :-1], found[:, 1:]


def find_parts(root: str | None) -> tuple[Part, Part, Part]:
    """Training, validation and test: three files of a folder, or parts of one file."""
    path = PROSE if root is None else Path(root).expanduser()
    if path.is_dir():
        for names in LAYOUTS:
            if (path / names[0]).is_file():
                missing = [name for name in names if not (path / name).is_file()]
                if missing:
                    raise DataError(
                        f"data.root={root} has {names[0]} but no {', '.join(missing)}; add the missing files"
                    )
                train, val, test = (Part(path / name) for name in names)
                return train, val, test
        wanted = " or ".join(names[0] for names in LAYOUTS)
        raise DataError(f"data.root={root} has no {wanted}; set data.root to WikiText's folder or to a text file")
    lines = sum(1 for _ in lines_of(path))
    ends = [int(lines * share) for share in SHARES]
    if not 0 < ends[0] < ends[1] < lines:
        raise DataError(f"{path} has {lines} lines, too few for training, validation and test; give at least 20")
    return Part(path, 0, ends[0]), Part(path, ends[0], ends[1]), Part(path, ends[1])
