"""SQuAD's JSON as the authors publish it. file -> *questions* -> windows."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pl_pipe.errors import ConfigError, DataError

SAMPLE = Path(__file__).parent / "embedded" / "squad_sample.json"
VERSIONS = ("2.0", "1.1")
_KINDS = {str: "text", int: "a number", list: "a list"}


@dataclass(frozen=True)
class Answer:
    """A stretch of the context."""

    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def is_in(self, context: str) -> bool:
        return self.start >= 0 and context[self.start : self.end] == self.text


@dataclass(frozen=True)
class Question:
    """One question about one paragraph; without answers the paragraph has none."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]
    placed: bool = True
    """Whether its answers are where the file says; if not, it can be scored and not trained on."""

    @property
    def golds(self) -> tuple[str, ...]:
        return tuple(answer.text for answer in self.answers)


@dataclass(frozen=True)
class Questions:
    """A file's questions, and those whose answers are not where the file says."""

    all: tuple[Question, ...]
    misplaced: tuple[Question, ...]
    """None, unless these were to be left out."""


def read_questions(path: Path, *, version: str = "2.0", skip_misplaced: bool = False) -> Questions:
    """Every question of the file. An answer that is not in its context is an error, or counted and left out."""
    if version not in VERSIONS:
        raise ConfigError(f"data.version={version} is unknown; choose one of {', '.join(VERSIONS)}")
    content = _read_json(path)
    found: list[Question] = []
    misplaced: list[Question] = []
    known: set[str] = set()
    for context, qa in _entries(content, path):
        question = _question(context, qa, path, version=version)
        if question.id in known:
            raise DataError(f"{path} has the id {question.id} twice; predictions are by id, mend the file")
        known.add(question.id)
        wrong = [answer for answer in question.answers if not answer.is_in(context)]
        if wrong and not skip_misplaced:
            there = context[wrong[0].start : wrong[0].end]
            raise DataError(
                f"{path}: the answer {wrong[0].text!r} of question {question.id} is not at character {wrong[0].start} "
                f"of its context, which has {there!r} there; mend the file, or set data.skip_misplaced=true to leave "
                "such questions out"
            )
        if wrong:
            misplaced.append(replace(question, placed=False))
        else:
            found.append(question)
    if not found:
        raise DataError(f"{path} has no question that can be used ({len(misplaced)} misplaced answers)")
    return Questions(tuple(found), tuple(misplaced))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} is no file; give SQuAD's train-v2.0.json or dev-v2.0.json")
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON in UTF-8 ({error}); fetch it anew") from error
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise DataError(f"{path} has no list called data; give SQuAD's train-v2.0.json or dev-v2.0.json")
    return content


def _entries(content: dict[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, article in enumerate(content["data"]):
        for paragraph in _field(article, "paragraphs", list, path, f"article {number}"):
            where = f"a paragraph of article {number}"
            questions = _field(paragraph, "qas", list, path, where)
            context: str = _field(paragraph, "context", str, path, where)
            for qa in questions:
                yield context, qa


def _field(owner: Any, name: str, kind: type, path: Path, where: str) -> Any:
    """What stands under a name; an error tells the place where the file is not what SQuAD's are."""
    found = owner.get(name) if isinstance(owner, dict) else None
    if isinstance(found, kind) and not isinstance(found, bool):
        return found
    if not isinstance(owner, dict):
        fact = f"{where} is {_short(owner)} instead of an object"
    elif name not in owner:
        fact = f"{where} has no {name}"
    else:
        fact = f"{name} of {where} is {_short(found)}, not {_KINDS[kind]}"
    raise DataError(f"{path} is not laid out as SQuAD is: {fact}; mend the file or fetch it anew")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _question(context: str, qa: dict[str, Any], path: Path, *, version: str) -> Question:
    where = f"question {qa.get('id')}" if isinstance(qa, dict) else "an entry of qas"
    asked: str = _field(qa, "question", str, path, where)
    if version == "2.0" and "is_impossible" not in qa:
        raise DataError(
            f"{path} is SQuAD 1.1: question {qa.get('id')} does not say whether it is_impossible; fetch the files of "
            "version 2.0, or set data.version=1.1, by which every question has an answer"
        )
    if "id" not in qa:
        raise DataError(f"{path} is not laid out as SQuAD is: the question {_short(asked)} has no id; mend the file")
    impossible = bool(qa.get("is_impossible", False))
    answers: tuple[Answer, ...] = ()
    if not impossible:
        place = f"an answer of {where}"
        answers = tuple(
            Answer(_field(given, "text", str, path, place), _field(given, "answer_start", int, path, place))
            for given in _field(qa, "answers", list, path, where)
        )
    question = Question(str(qa["id"]), asked.strip(), context, answers)
    if not impossible and not answers:
        raise DataError(f"{path}: question {question.id} has no answers and is not is_impossible; mend the file")
    return question
