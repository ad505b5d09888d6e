"""Wikipedia for pre-training: a dump as plain text, and shards of it. dump.xml.bz2 -> *text/* -> shards (a hook)."""

import bz2
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from xml.etree import ElementTree

from typing_extensions import override

from pl_pipe.errors import ConfigError, DataError

from .hook import Hook
from .preparation import Preparation
from .report import Advance, Report
from .space import check_space
from .wikitext import NAMESPACES, paragraphs

TEXT, SHARDS = "text", "shards"
MADE_OF = ".made_of.json"
LEFT_OUT = ("-2", "6", "10", "14")
"""Numbers of the namespaces of media, files, templates and categories, in every wiki."""


class WikiPreparation(Preparation):
    """Articles as paragraphs, a line each, with an empty line between articles; in files of `text_bytes`.

    The dump is read once, from the start, in constant memory; a broken call begins this step again.
    """

    name, trains = "wiki", "bert"

    def __init__(
        self,
        *,
        shards: Mapping[str, Any],
        dump: str = "enwiki",
        date: str = "latest",
        text_bytes: int = 100_000_000,
        least_words: int = 5,
        **settings: Any,
    ) -> None:
        """`dump` and `date` stand in the names of the sources."""
        super().__init__(**settings)
        if text_bytes < 1 or least_words < 1:
            raise ConfigError(
                f"prepare.text_bytes={text_bytes} and prepare.least_words={least_words} are too small; the least is 1"
            )
        self.text_bytes, self.least_words = text_bytes, least_words
        self.shards = Hook("prepare.shards", shards.get("hook"), shards.get("settings") or {})

    @override
    def hooks(self) -> Sequence[Hook]:
        return (self.shards,)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {
            "text": [self.text_bytes, self.least_words],
            "shards": [self.shards.path, dict(self.shards.settings)],
        }

    @override
    def hint(self, root: Path) -> str:
        shards = root / SHARDS
        if self.shards.path is None:
            return f"Next: python -m pl_pipe.recipes.language.make_shards {root / TEXT}/*.txt --out {shards}"
        words = f" data.vocabulary={shards / 'vocab.txt'}" if (shards / "vocab.txt").is_file() else ""
        return f"Next: pl-pipe fit recipe={self.trains} data={self.name} data.root={shards}{words}"

    @override
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        text = root / TEXT
        made_of = json.dumps([[*files], self.text_bytes, self.least_words])
        if not text.is_dir():
            self._write_texts(text, files, report, made_of)
        elif not (text / MADE_OF).is_file() or (text / MADE_OF).read_text() != made_of:
            raise DataError(
                f"{text} holds texts of another dump, or made with other settings; move it away, or set data.root to "
                f"another folder"
            )
        if self.shards.path is None:
            return [text]
        return [text, *self._make_shards(text, root / SHARDS, report, json.dumps([made_of, self.settings()]))]

    def _make_shards(self, text: Path, folder: Path, report: Report, made_of: str) -> list[Path]:
        """Files get into the folder when all are complete; what an earlier call made of the same text is replaced."""
        mark = folder / MADE_OF
        if folder.is_dir() and any(folder.iterdir()) and not (mark.is_file() and mark.read_text() == made_of):
            raise DataError(
                f"{folder} holds files of another make, as {min(path.name for path in folder.iterdir())}; move it "
                f"away, or set data.root to another folder"
            )
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a call that was broken off
        part.mkdir()
        try:
            made = self.shards.run(sorted(text.glob("*.txt")), part, report)
            folder.mkdir(exist_ok=True)
            mark.write_text(made_of)  # first: a call that is broken off now leaves files that the next one knows
            return [_moved(path, folder / path.relative_to(part)) for path in made]
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write_texts(self, text: Path, files: Mapping[str, Path], report: Report, made_of: str) -> None:
        """The folder appears when it is complete."""
        part = text.with_name(f".{text.name}.part")
        shutil.rmtree(part, ignore_errors=True)  # of a call that was broken off
        check_space(text.parent, sum(dump.stat().st_size for dump in files.values()), what=f"writing {text}")
        part.mkdir()
        count = 0
        with _TextFiles(part, self.text_bytes) as writer:
            for dump in files.values():
                for article in articles(dump, report, least_words=self.least_words):
                    writer.write("\n".join(article) + "\n\n")
                    count += 1
        if not count:
            raise DataError(f"{', '.join(files)} has no articles in it; fetch a dump called …-pages-articles.xml.bz2")
        (part / MADE_OF).write_text(made_of)
        part.rename(text)
        report.say(f"{count} articles in {len(list(text.glob('*.txt')))} file(s)")


def _moved(path: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return path.replace(target)


def articles(dump: Path, report: Report, *, least_words: int) -> Iterator[list[str]]:
    """The paragraphs of every article that is none of the encyclopedia's own pages, and no redirection."""
    with dump.open("rb") as packed, report.bar(f"reading {dump.name}", dump.stat().st_size) as advance:
        stream: Any = _Counted(packed, advance)
        if dump.suffix == ".bz2":
            stream = bz2.BZ2File(stream)
        try:
            yield from _pages(stream, least_words)
        except (ElementTree.ParseError, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(f"{dump} is damaged or no dump of a wiki ({error}); fetch it anew") from error


def _pages(stream: Any, least_words: int) -> Iterator[list[str]]:
    events = iter(ElementTree.iterparse(stream, events=("start", "end")))
    _, root = next(events)
    namespaces = set(NAMESPACES)
    for event, element in events:
        if event == "end" and element.tag.rpartition("}")[2] == "namespace" and element.get("key") in LEFT_OUT:
            namespaces.add((element.text or "").lower())  # as this wiki's language calls it
        if event == "end" and element.tag.rpartition("}")[2] == "page":
            kinds = {child.tag.rpartition("}")[2]: child for child in element.iter()}
            plain = kinds.get("ns") is not None and (kinds["ns"].text or "").strip() == "0"
            if plain and "redirect" not in kinds and "text" in kinds:
                found = paragraphs(kinds["text"].text or "", least_words=least_words, namespaces=namespaces)
                if found:
                    yield found
            root.clear()  # else the whole dump would stay in memory


class _Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: IO[bytes], advance: Advance) -> None:
        self.file, self.advance = file, advance

    def read(self, size: int = -1) -> bytes:
        chunk = self.file.read(size)
        self.advance(len(chunk))
        return chunk

    def seekable(self) -> bool:
        return False


class _TextFiles:
    """Files one after the other, each up to a size."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.count, self.written = 0, 0
        self.file: Any = None

    def __enter__(self) -> "_TextFiles":
        return self

    def write(self, text: str) -> None:
        content = text.encode()
        if self.file is None or (self.written and self.written + len(content) > self.limit_bytes):
            self._next()
        self.file.write(content)
        self.written += len(content)

    def _next(self) -> None:
        self.__exit__()
        self.file = (self.folder / f"wiki_{self.count:04d}.txt").open("wb")
        self.count, self.written = self.count + 1, 0

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
