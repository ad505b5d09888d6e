"""Answers in words from the logits of a question's windows. spans -> *answers* -> score. After BERT's run_squad.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pl_pipe.errors import ConfigError

from .squad_windows import Window

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AnswerRule:
    """How an answer is chosen."""

    candidates: int = 20
    """Starts and ends of each window that are looked at, the likeliest first."""
    longest: int = 30
    """Tokens of an answer at most."""
    null_threshold: float = 0.0
    """The empty answer is given where its score exceeds the best span's by more than this."""

    def __post_init__(self) -> None:
        if self.candidates < 1 or self.longest < 1:
            raise ConfigError(
                f"evaluation.candidates={self.candidates} and evaluation.longest={self.longest} must be at least 1"
            )


@dataclass(frozen=True)
class ChosenAnswer:
    """What is said to a question."""

    text: str
    null_odds: float
    """Score of the empty answer less the best span's; the official script takes it for a threshold of its own."""


def choose_answer(
    context: str, windows: Sequence[tuple[Window, Logits, Logits]], rule: AnswerRule, *, unanswerable: bool
) -> ChosenAnswer:
    """The likeliest span of all windows, or nothing, which is likeliest where token 0 is in every one of them.

    Where windows overlap, a span counts in each of them: BERT's rule that only the window which shows most around a
    token may speak of it (its maximal context) is left out.
    """
    best, text, nothing = -np.inf, "", np.inf
    for window, starts, ends in windows:
        nothing = min(nothing, float(starts[0] + ends[0]))
        score, span = _best_span(window, starts, ends, rule)
        if span is not None and score > best:
            best, text = score, context[span[0] : span[1]]
    odds = nothing - (best if np.isfinite(best) else 0.0)  # where no span can be, BERT's script takes one of score 0
    if unanswerable and odds > rule.null_threshold:
        text = ""
    return ChosenAnswer(text, float(odds))


def _best_span(window: Window, starts: Logits, ends: Logits, rule: AnswerRule) -> tuple[float, tuple[int, int] | None]:
    """Score and characters of the best pair among the likeliest starts and ends within the context."""
    first, tokens = window.context_from, len(window.offsets)
    start, end = starts[first : first + tokens], ends[first : first + tokens]
    if not tokens:
        return -np.inf, None
    top_starts, top_ends = (np.argsort(-values, kind="stable")[: rule.candidates] for values in (start, end))
    scores = start[top_starts][:, None] + end[top_ends][None, :]
    length = top_ends[None, :] - top_starts[:, None] + 1
    scores = np.where((length >= 1) & (length <= rule.longest), scores, -np.inf)
    row, column = np.unravel_index(int(scores.argmax()), scores.shape)
    if scores[row, column] == -np.inf:
        return -np.inf, None
    begin, until = window.offsets[top_starts[row], 0], window.offsets[top_ends[column], 1]
    return float(scores[row, column]), (int(begin), int(until))
