"""SQuAD 2.0: two JSON files, used as they come, and a vocabulary (a hook) for those who start from no model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from pl_pipe.errors import DataError

from .hook import Hook
from .preparation import Preparation
from .report import Report

VERSION = "v2.0"


class SquadPreparation(Preparation):
    """Checks that the files are what they are called; those of version 1.1 have no unanswerable questions."""

    name, trains = "squad", "bert_squad"

    def __init__(self, *, vocabulary: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        given = vocabulary or {}
        self.vocabulary = Hook("prepare.vocabulary", given.get("hook"), given.get("settings") or {})

    @override
    def hooks(self) -> Sequence[Hook]:
        return (self.vocabulary,)

    @override
    def settings(self) -> Mapping[str, Any]:
        return {"vocabulary": [self.vocabulary.path, dict(self.vocabulary.settings)]}

    @override
    def hint(self, root: Path) -> str:
        own = root / "vocab.txt"  # as our own step calls it
        words = own if own.is_file() else "<the vocab.txt of your weights>"
        return (
            f"{super().hint(root)} data.vocabulary={words} data.window=384 data.stride=128 data.question=64. To start "
            f"from a model of Hugging Face, add recipe.weights=FOLDER and set data.vocabulary=FOLDER/vocab.txt "
            f"(docs/language.md)."
        )

    @override
    def build(self, root: Path, files: Mapping[str, Path], report: Report) -> Sequence[Path]:
        for path in files.values():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                version, articles = content["version"], content["data"]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{path} is no SQuAD file ({type(error).__name__}: {error}); fetch it anew") from error
            if version != VERSION:
                raise DataError(f"{path} is of SQuAD version {version}, expected {VERSION}; fetch that one")
            report.say(f"{path.name}: {len(articles)} articles")
        return [*files.values(), *self.vocabulary.run(list(files.values()), root, report)]
