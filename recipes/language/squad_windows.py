"""Questions and stretches of their paragraphs as token ids. questions -> *windows* -> encoder -> spans.

    [CLS] question [SEP] context tokens 0 … 319 [SEP]      window 0
    [CLS] question [SEP] context tokens 128 … 447 [SEP]    window 1: starts `stride` tokens later

A paragraph longer than a window becomes several that overlap, so that an answer cut by one is whole in the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pl_pipe.errors import ConfigError

from .squad_format import Answer, Question
from .vocabulary import CLASS, SEPARATOR, UNKNOWN, Vocabulary

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Window:
    """One sequence for the encoder."""

    question: int
    """Place of its question in the list."""
    ids: Numbers
    context_from: int
    """The first token of the context within `ids`."""
    offsets: Numbers
    """Where each token of the context begins and ends, in characters; a row a token."""
    start: int
    """First and last token of the answer; both 0 where this window does not hold it."""
    end: int


@dataclass(frozen=True)
class WindowRule:
    """Lengths in tokens."""

    window: int = 384
    stride: int = 128
    question: int = 64

    def __post_init__(self) -> None:
        if self.question < 1 or self.stride < 1 or self.window - self.question - 3 < self.stride:
            raise ConfigError(
                f"data.window={self.window} leaves {self.window - self.question - 3} tokens of context beside "
                f"data.question={self.question} and three signs, and data.stride={self.stride} must be from 1 to that; "
                "lengthen the window"
            )


@dataclass(frozen=True)
class WindowTally:
    """What did not fit."""

    questions: int
    windows: int
    long_questions: int
    """Questions of which the last tokens were cut."""
    long_contexts: int
    """Questions whose paragraph became several windows."""
    whole_nowhere: int
    """Answers longer than a window, of which none is whole."""
    unknown_share: float
    """Of the paragraphs' tokens, those that the vocabulary does not have."""

    def describe(self) -> str:
        return (
            f"{self.questions:,} questions in {self.windows:,} windows; {self.long_contexts:,} have a paragraph longer "
            f"than a window, {self.long_questions:,} were cut, {self.whole_nowhere:,} answers fit into no window; "
            f"the vocabulary does not have {100 * self.unknown_share:.1f} % of the paragraphs' tokens"
        )


def make_windows(
    questions: Sequence[Question], vocabulary: Vocabulary, rule: WindowRule
) -> tuple[list[Window], WindowTally]:
    """The windows of all questions in order; every question has at least one."""
    tokenizer = vocabulary.tokenizer()
    first, separator = vocabulary.ids[CLASS], vocabulary.ids[SEPARATOR]
    windows: list[Window] = []
    long_questions = long_contexts = whole_nowhere = 0
    contexts = _encoded_once(tokenizer, [question.context for question in questions])
    texts = _encoded_once(tokenizer, [question.text for question in questions])
    for place, question in enumerate(questions):
        asked, _ = texts[question.text]
        long_questions += len(asked) > rule.question
        head = [first, *asked[: rule.question], separator]
        tokens, offsets = contexts[question.context]
        room = rule.window - len(head) - 1
        long_contexts += len(tokens) > room
        span = _token_span(offsets, question.answers[0]) if question.answers and question.placed else None
        held = False
        for begin in _begins(len(tokens), room, rule.stride):
            until = min(begin + room, len(tokens))
            start = end = 0
            if span is not None and begin <= span[0] and span[1] < until:
                start, end, held = len(head) + span[0] - begin, len(head) + span[1] - begin, True
            ids = np.concatenate([head, tokens[begin:until], [separator]]).astype(np.int32)
            windows.append(Window(place, ids, len(head), offsets[begin:until], start, end))
        whole_nowhere += bool(question.answers) and question.placed and not held
    all_tokens = np.concatenate([tokens for tokens, _ in contexts.values()])
    unknown_share = float((all_tokens == vocabulary.ids[UNKNOWN]).mean()) if len(all_tokens) else 0.0
    tally = WindowTally(len(questions), len(windows), long_questions, long_contexts, whole_nowhere, unknown_share)
    return windows, tally


def _begins(tokens: int, room: int, stride: int) -> range:
    """First tokens of windows, up to the one that reaches the end."""
    further = max(0, -(-(tokens - room) // stride))
    return range(0, further * stride + 1, stride)


def _encoded_once(tokenizer: Any, texts: Sequence[str]) -> dict[str, tuple[Numbers, Numbers]]:
    """Ids and offsets by text; several questions share a paragraph."""
    different = list(dict.fromkeys(texts))
    encodings = tokenizer.encode_batch(different, add_special_tokens=False)
    return {
        text: (np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int32).reshape(-1, 2))
        for text, encoding in zip(different, encodings, strict=True)
    }


def _token_span(offsets: Numbers, answer: Answer) -> tuple[int, int] | None:
    """The first and last token that have a character of the answer; None where no token has one."""
    touched = np.flatnonzero((offsets[:, 0] < answer.end) & (offsets[:, 1] > answer.start))
    return (int(touched[0]), int(touched[-1])) if len(touched) else None
