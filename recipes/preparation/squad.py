"""SQuAD 2.0: two JSON files, used as they come."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from pl_pipe.errors import DataError

from .preparation import Preparation
from .report import Report

VERSION = "v2.0"


class SquadPreparation(Preparation):
    """Checks that the files are what they are called; those of version 1.1 have no unanswerable questions."""

    name, trains = "squad", "bert_squad"

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
        return list(files.values())
