"""Any pair of text files: WMT, Multi30k, your own; raw, or with BPE applied already as in the original's files."""

from pathlib import Path

from pl_pipe.errors import ConfigError, DataError

from .corpus import Corpus, TextPair
from .datamodule import TranslationData


def parallel_text_data(
    *,
    root: str | None = None,
    source_language: str = "en",
    target_language: str = "de",
    train: str = "train",
    val: str = "val",
    test: str = "test",
    source: str | None = None,
    reference: str | None = None,
    pretokenized: bool = False,
    vocabulary: str | None = None,
    **settings: object,
) -> TranslationData:
    """The data module; `settings` are `TranslationData`'s.

    `root` holds `train.en` and `train.de`, `val.…` and `test.…`, plain or with `.gz`. A split whose files are absent is
    left out, but for training: without it there must be `source` and `reference`, to evaluate on.
    """
    if (source is None) != (reference is None):
        given, absent = ("source", "reference") if reference is None else ("reference", "source")
        raise ConfigError(f"data.{given} is set and data.{absent} is not; evaluation needs both files")
    if root is None and source is None:
        raise ConfigError(
            f"no text was named; data.root=<folder with {train}.{source_language} and {train}.{target_language}> to "
            f"train, data.source=<file> data.reference=<file> to evaluate"
        )
    if pretokenized and vocabulary is None:
        raise ConfigError("data.pretokenized=true needs data.vocabulary=<file with one token a line>")
    corpora: dict[str, Corpus] = {}
    if root is not None:
        folder = Path(root).expanduser()
        if not folder.is_dir():
            raise DataError(f"data.root={root} is not a folder")
        languages = (source_language, target_language)
        for split, stem in (("train", train), ("val", val), ("test", test)):
            found = [_file(folder, f"{stem}.{language}") for language in languages]
            files = [file for file in found if file is not None]
            if len(files) == 2:
                corpora[split] = TextPair(files[0], files[1])
            elif files or (split == "train" and source is None):
                lacking = [
                    f"{stem}.{language}" for language, file in zip(languages, found, strict=True) if file is None
                ]
                raise DataError(
                    f"data.root={root} has no {' and no '.join(lacking)} (plain or .gz); data.{split}=<name before the "
                    f"language>, data.source_language and data.target_language say what to look for"
                )
    if source is not None and reference is not None:
        corpora["test"] = TextPair(Path(source).expanduser(), Path(reference).expanduser())
    return TranslationData(corpora, vocabulary=vocabulary, **settings)  # type: ignore[arg-type]


def _file(folder: Path, name: str) -> Path | None:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None
