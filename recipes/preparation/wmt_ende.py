"""WMT English-German: three corpora as one pair of texts, two years' news as validation and test, and a vocabulary.

europarl, commoncrawl, news commentary ─► train.en, train.de ─► vocabulary (a hook)
newstest2013, newstest2014             ─► newstest2013.en, …
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from pl_pipe.errors import ConfigError, DataError

from .hook import Hook
from .preparation import Preparation
from .report import Report
from .space import check_space
from .unpacking import unpack

LANGUAGES = ("en", "de")
UNPACKED = "unpacked"
_SEGMENT = re.compile(r"<seg[^>]*>(.*?)</seg>")


class WmtEnDePreparation(Preparation):
    """`texts` says of what each pair of files is made: `{train: [{archive: …, en: member, de: member}, …], …}`."""

    name, trains = "wmt_ende", "gnmt8"

    def __init__(
        self, *, texts: Mapping[str, Sequence[Mapping[str, str]]], vocabulary: Mapping[str, Any], **settings: Any
    ) -> None:
        super().__init__(**settings)
        known = {source.file for source in self.sources}
        for parts in texts.values():
            for part in parts:
                if part["archive"] not in known:
                    raise ConfigError(
                        f"prepare.texts takes archive={part['archive']}, which is none of prepare.sources"
                    )
        if "train" not in texts:
            raise ConfigError("prepare.texts has no train; the vocabulary is made of it")
        self.texts = texts
        self.vocabulary = Hook("prepare.vocabulary", vocabulary.get("hook"), vocabulary.get("settings") or {})

    @override
    def hooks(self) -> Sequence[Hook]:
        return (self.vocabulary,)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"texts": self.texts, "vocabulary": [self.vocabulary.path, dict(self.vocabulary.settings)]}

    @override
    def hint(self, root: Path) -> str:
        evaluated = [name for name in self.texts if name != "train"]
        names = [f"data.{use}={name}" for use, name in zip(("val", "test"), evaluated, strict=False)]
        vocabulary = root / "vocabulary.json"  # as our own step calls it
        if vocabulary.is_file():
            names += [f"data.vocabulary={vocabulary}", *_size_of(vocabulary)]
        return (
            f"Next: pl-pipe fit recipe={self.trains} data=parallel_text data.root={root} {' '.join(names)}. "
            f"{root / UNPACKED} and the archives are not needed any more."
        )

    @override
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        unpacked = root / UNPACKED
        unpacked.mkdir(exist_ok=True)
        for name, archive in files.items():
            wanted = {
                part[language]
                for parts in self.texts.values()
                for part in parts
                if part["archive"] == name
                for language in LANGUAGES
            }
            found = unpack(archive, unpacked, report, placing=partial(_kept, wanted=wanted))
            absent = wanted - {str(path.relative_to(unpacked)) for path in found}
            if absent:
                raise DataError(f"{archive} has no {sorted(absent)[0]} in it; fetch the right archive")
        made = []
        for name, parts in self.texts.items():
            pair = [root / f"{name}.{language}" for language in LANGUAGES]
            lines = [
                _write_text(target, [unpacked / part[language] for part in parts], report)
                for target, language in zip(pair, LANGUAGES, strict=True)
            ]
            if lines[0] != lines[1]:
                raise DataError(
                    f"{pair[0]} has {lines[0]} lines, {pair[1]} has {lines[1]}; sentences would not belong together: "
                    f"fetch the archives anew"
                )
            report.say(f"{name}: {lines[0]} pairs of sentences")
            made += pair
        return made + self.vocabulary.run(made[:2], root, report)


def _size_of(vocabulary: Path) -> list[str]:
    """The setting that makes room for its tokens; none for a file of another hook, which may be anything."""
    try:
        return [f"data.vocabulary_size={len(json.loads(vocabulary.read_text(encoding='utf-8'))['model']['vocab'])}"]
    except (ValueError, KeyError, TypeError):
        return []


def _kept(member: str, wanted: set[str]) -> str | None:
    plain = member.removeprefix("./")
    return plain if plain in wanted else None


def _write_text(target: Path, sources: Sequence[Path], report: Report) -> int:
    """The sources one after the other, a sentence a line; returns how many lines there are."""
    lines = 0
    check_space(target.parent, sum(source.stat().st_size for source in sources), what=f"writing {target.name}")
    part = target.with_name(f".{target.name}.part")
    with part.open("wb") as file, report.bar(f"writing {target.name}", None) as advance:
        for source in sources:
            if source.suffix == ".sgm":
                sentences = sentences_of(source)
                file.write("".join(f"{sentence}\n" for sentence in sentences).encode())
                lines += len(sentences)
            else:
                lines += _append(source, file)
            advance(source.stat().st_size)
    part.replace(target)
    return lines


def _append(source: Path, file: Any) -> int:
    """Bytes as they are: text mode would also split lines at signs that only look like an end of line."""
    lines, last = 0, b"\n"
    with source.open("rb") as text:
        while chunk := text.read(1 << 20):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
            file.write(chunk)
    if last != b"\n":
        file.write(b"\n")
        lines += 1
    return lines


def sentences_of(path: Path) -> list[str]:
    """The segments of an evaluation set in SGML, as sacrebleu reads them: spaces are joined, nothing is unescaped."""
    found = [" ".join(match.split()) for match in _SEGMENT.findall(path.read_text(encoding="utf-8"))]
    if not found:
        raise DataError(f"{path} has no segments (<seg>) in it; it is no evaluation set of WMT")
    return found
