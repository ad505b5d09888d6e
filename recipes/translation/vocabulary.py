"""Subword vocabularies: text to ids and back. corpus -> *vocabulary* -> encoded pairs; also translations -> text.

Two kinds. One is trained here on raw text (byte-level BPE by the `tokenizers` library: every text has ids, and comes
back as it was). The other is the list of tokens that belongs to files in which BPE has been applied already, as the
original used them: `wer@@ de` is two tokens and one word.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from pl_pipe.errors import ConfigError, DataError

from ..extras import needed
from ..preparation.report import Report, Silence
from ..text_file import lines_of
from .moses import detokenize
from .special_ids import BEGIN, END, PAD, UNKNOWN

_REMEMBERED_WORDS = 200_000
SPECIALS = ("<pad>", "<unk>", "<s>", "</s>")
assert [SPECIALS[i] for i in (PAD, UNKNOWN, BEGIN, END)] == list(SPECIALS)


class Vocabulary(Protocol):
    """What the data modules and the evaluation need of one."""

    @property
    def size(self) -> int: ...

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Ids without `BEGIN` and `END`."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special ones are left out."""

    def plain(self, line: str) -> str:
        """A line of a corpus as people write it: what a translation is compared with."""

    def text(self) -> str:
        """A file's content from which `vocabulary_of` makes it again."""


class SubwordVocabulary:
    """Byte-level BPE of the `tokenizers` library.

    Its tokens never reach over a space, so the ids of a line are those of its words. Words come again and again: what
    they were encoded to is remembered, which is several times as fast as asking the library for whole lines.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # `</s>` in a text is a word like any other
        self._known: dict[str, list[int]] = {}

    @classmethod
    def trained(cls, lines: Iterable[str], *, size: int, setting: str = "data.vocabulary_size") -> "SubwordVocabulary":
        """Learns at most `size` tokens, the special ones among them; the same lines give the same tokens.

        `setting` is what an error calls the size.
        """
        tokenizers = needed("tokenizers")
        least = len(SPECIALS) + 256
        if size < least:
            raise ConfigError(f"{setting}={size} leaves no room for all bytes; set at least {least}")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(SPECIALS),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        known = self._known
        divided = [self._words(line) for line in lines]
        new = list({word for words in divided for word in words if word not in known})
        if len(known) + len(new) > _REMEMBERED_WORDS:
            known.clear()
            new = list({word for words in divided for word in words})
        for word, encoding in zip(new, self._tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True):
            known[word] = encoding.ids
        return [list(chain.from_iterable([known[word] for word in words])) for words in divided]

    def _words(self, line: str) -> list[str]:
        """What can be encoded by itself; a line with any other white space than single spaces only as a whole."""
        words = line.split()
        return words if " ".join(words) == line else [line]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def plain(self, line: str) -> str:
        return line.strip()

    def text(self) -> str:
        return str(self._tokenizer.to_str())


class ListedVocabulary:
    """Tokens in the order of a file; lines are split at spaces, and `@@` says that the word goes on."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = [*SPECIALS, *(token for token in dict.fromkeys(tokens) if token and token not in SPECIALS)]
        controls = (PAD, BEGIN, END)  # of which a text may speak: they are unknown words there
        self._ids = {token: number for number, token in enumerate(self.tokens) if number not in controls}

    @property
    def size(self) -> int:
        return len(self.tokens)

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        ids = self._ids
        return [[ids.get(token, UNKNOWN) for token in line.split(" ") if token] for line in lines]

    def decode(self, ids: Sequence[int]) -> str:
        return self.plain(" ".join(self.tokens[number] for number in ids if number not in (PAD, BEGIN, END)))

    def plain(self, line: str) -> str:
        return detokenize(line.strip().replace("@@ ", "").removesuffix("@@"))

    def text(self) -> str:
        return "\n".join(self.tokens[len(SPECIALS) :]) + "\n"


def vocabulary_of(text: str, *, where: str) -> Vocabulary:
    """A vocabulary from a file's content: JSON of the `tokenizers` library, or one token a line."""
    if not _is_json(text):
        return ListedVocabulary(line.split(" ")[0].rstrip("\r") for line in text.split("\n"))
    try:
        tokenizer = needed("tokenizers").Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more special
        raise DataError(f"{where} is no vocabulary of the tokenizers library: {error}") from error
    found = [tokenizer.id_to_token(number) for number in range(len(SPECIALS))]
    if found != list(SPECIALS):
        raise DataError(
            f"{where} begins with the tokens {', '.join(map(str, found))}; it must begin with {', '.join(SPECIALS)}"
        )
    return SubwordVocabulary(tokenizer)


def _is_json(text: str) -> bool:
    """A list of tokens may begin with `{` too; a library's file that is cut short still shows its first key."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        json.loads(text)
    except ValueError:
        return text.lstrip()[1:].lstrip().startswith('"version"')
    return True


def read_vocabulary(path: Path) -> Vocabulary:
    if not path.is_file():
        raise DataError(f"data.vocabulary={path} does not exist; leave it out to train one, or give a file")
    try:
        return vocabulary_of(path.read_text(encoding="utf-8-sig"), where=f"data.vocabulary={path}")
    except UnicodeDecodeError as error:
        raise DataError(f"data.vocabulary={path} is not UTF-8 (byte {error.start}); give a text file") from error


def write_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Beside its place and renamed: ranks may do this at once, and nobody reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(vocabulary.text(), encoding="utf-8")
    part.replace(path)


def build_vocabulary(
    files: Sequence[Path], folder: Path, *, size: int = 32_000, lines: int = 1_000_000, report: Report | None = None
) -> Sequence[Path]:
    """The step of `pl-pipe data prepare` after the texts: `vocabulary.json`, of the first `lines` of each file."""
    pairs = zip(*(islice(lines_of(file), lines) for file in files), strict=False)
    setting = "prepare.vocabulary.settings.size"
    with (report or Silence()).bar(f"learning {size} subwords", None):
        trained = SubwordVocabulary.trained(chain.from_iterable(pairs), size=size, setting=setting)
    write_vocabulary(trained, folder / "vocabulary.json")
    return [folder / "vocabulary.json"]


def fingerprint(vocabulary: Vocabulary) -> str:
    """Sixteen letters that tell vocabularies apart."""
    return hashlib.sha256(vocabulary.text().encode()).hexdigest()[:16]
