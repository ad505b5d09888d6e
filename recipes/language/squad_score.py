"""Exact match and F1 of SQuAD 2.0, as the official evaluation script defines them.

Answers are compared in lower case, without punctuation, without the articles a, an and the, and with single spaces.
Each question counts by its best gold answer; where there is none, only the empty answer is right, in both scores.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pl_pipe.errors import DataError

from .squad_format import Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def normalised(answer: str) -> str:
    bare = "".join(sign for sign in answer.lower() if sign not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(gold: str, answer: str) -> float:
    return float(normalised(gold) == normalised(answer))


def f1(gold: str, answer: str) -> float:
    """Harmonic mean of precision and recall over words, as bags; for no answer, whether both are none."""
    gold_words, words = normalised(gold).split(), normalised(answer).split()
    if not gold_words or not words:
        return float(gold_words == words)
    common = sum((Counter(gold_words) & Counter(words)).values())
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def scores(golds: Iterable[str], answer: str) -> tuple[float, float]:
    """Exact match and F1 of one question. Gold answers that are articles or punctuation alone do not count."""
    counting = [gold for gold in golds if normalised(gold)] or [""]
    return max(exact_match(gold, answer) for gold in counting), max(f1(gold, answer) for gold in counting)


def score_predictions(questions: Sequence[Question], predictions: Mapping[str, str]) -> dict[str, float]:
    """Means in per cent under the official names; every question must have a prediction."""
    missing = [question.id for question in questions if question.id not in predictions]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(questions)} questions have no prediction, as {missing[0]}; give one for each"
        )
    found = [(*scores(question.golds, predictions[question.id]), bool(question.answers)) for question in questions]
    result = _means(found, "")
    for name, answerable in (("HasAns_", True), ("NoAns_", False)):
        part = [entry for entry in found if entry[2] is answerable]
        if part:
            result |= _means(part, name)
    return result


def _means(found: Sequence[tuple[float, float, bool]], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}exact": 100.0 * sum(exact for exact, _, _ in found) / len(found),
        f"{prefix}f1": 100.0 * sum(overlap for _, overlap, _ in found) / len(found),
        f"{prefix}total": float(len(found)),
    }
