"""WordPiece vocabularies: a user's `vocab.txt` or the embedded one. text -> *vocabulary* -> token ids.

The splitting is the `tokenizers` library's; here is only what surrounds it: reading, training, and a seal by which a
checkpoint knows the vocabulary it was trained with.
"""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_pipe.errors import ConfigError, DataError

from ..extras import needed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
EMBEDDED = Path(__file__).parent / "embedded" / "vocab.txt"


@dataclass(frozen=True)
class Vocabulary:
    """Words and pieces of words; a token's id is its place in `tokens`."""

    tokens: tuple[str, ...]
    lowercase: bool = True

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def digest(self) -> int:
        """Tells vocabularies apart, and whether texts are lower-cased for them; never 0."""
        cased = () if self.lowercase else ("cased",)
        return zlib.crc32("\n".join((*self.tokens, *cased)).encode()) or 1

    def tokenizer(self) -> "Tokenizer":
        """The library's, without special tokens; each caller has its own, since truncation is a state of it."""
        tokenizers = needed("tokenizers")
        model = tokenizers.models.WordPiece(self.ids, unk_token=UNKNOWN, max_input_chars_per_word=100)
        made: Tokenizer = _untrained(tokenizers, model, lowercase=self.lowercase)
        return made


def read_vocabulary(path: str | None, *, lowercase: bool = True, setting: str = "data.vocabulary=") -> Vocabulary:
    """One token a line; without a path the embedded one. `setting` is where an error says that the path came from."""
    file = EMBEDDED if path is None else Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{setting}{path} is no file; set it to a WordPiece vocab.txt, one token a line")
    try:
        tokens = file.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {error.start}); give a WordPiece vocab.txt") from error
    tokens = [token.rstrip("\r") for token in tokens]
    missing = [token for token in SPECIAL if token not in tokens]
    if missing:
        raise DataError(f"{file} has no {', '.join(missing)} among its {len(tokens)} lines; give a WordPiece vocab.txt")
    if len(set(tokens)) != len(tokens):
        twice = next(token for place, token in enumerate(tokens) if token in tokens[:place])
        raise DataError(f"{file} has the token {twice!r} twice; ids would be ambiguous, mend the file")
    return Vocabulary(tuple(tokens), lowercase)


def train_vocabulary(
    texts: Iterable[str], *, size: int, lowercase: bool = True, quiet: bool = False, setting: str = "vocabulary_size"
) -> Vocabulary:
    """A WordPiece vocabulary of at most `size` tokens for `texts`, which are read once; an error calls it `setting`."""
    if size <= len(SPECIAL):
        raise ConfigError(f"{setting}={size} leaves no room beside {', '.join(SPECIAL)}; set some thousands")
    tokenizers = needed("tokenizers")
    tokenizer = _untrained(tokenizers, tokenizers.models.WordPiece(unk_token=UNKNOWN), lowercase=lowercase)
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), show_progress=not quiet
    )
    tokenizer.train_from_iterator(texts, trainer)
    ids: dict[str, int] = tokenizer.get_vocab()
    return Vocabulary(tuple(sorted(ids, key=lambda token: ids[token])), lowercase)


def write_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """One token a line, beside the target and renamed."""
    part = path.with_name(path.name + ".part")
    part.write_text("\n".join(vocabulary.tokens) + "\n", encoding="utf-8")
    part.replace(path)


def encode_all(tokenizer: "Tokenizer", texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, special tokens not added."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _untrained(tokenizers: Any, model: Any, *, lowercase: bool) -> Any:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer
