"""SQuAD: from the official JSON over windows and spans to answers, and the official scores."""

import json
import math
import re
import string
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.language.pretraining import BertPretraining
from pl_pipe.recipes.language.question_answering import BertQuestionAnswering
from pl_pipe.recipes.language.squad_answers import AnswerRule, choose_answer
from pl_pipe.recipes.language.squad_data import SquadData
from pl_pipe.recipes.language.squad_evaluation import SquadEvaluation
from pl_pipe.recipes.language.squad_format import SAMPLE, Answer, Question, read_questions
from pl_pipe.recipes.language.squad_score import normalised, score_predictions, scores
from pl_pipe.recipes.language.squad_windows import Window, WindowRule, make_windows
from pl_pipe.recipes.language.vocabulary import EMBEDDED, read_vocabulary

pytest.importorskip("tokenizers", reason="of the text extra")


# ---- scores


def plain_words(answer: str) -> list[str]:
    """Another way to the official normalisation: words after punctuation is gone, articles struck out."""
    lowered = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return [word for word in re.sub(r"(?<!\w)(an?|the)(?!\w)", " ", lowered).split() if word]


def plain_scores(golds: list[str], answer: str) -> tuple[float, float]:
    best = [0.0, 0.0]
    for gold in [gold for gold in golds if plain_words(gold)] or [""]:
        theirs, ours = plain_words(gold), plain_words(answer)
        left, same = list(theirs), 0
        for word in ours:
            if word in left:
                left.remove(word)
                same += 1
        if not theirs or not ours:
            overlap = 1.0 if theirs == ours else 0.0
        else:
            overlap = 2.0 * same / (len(theirs) + len(ours))
        best = [max(best[0], float(theirs == ours)), max(best[1], overlap)]
    return best[0], best[1]


@pytest.mark.parametrize(
    ("golds", "answer", "exact", "overlap"),
    [
        (["the Eiffel Tower"], "Eiffel tower!", 1.0, 1.0),  # articles, case, punctuation
        (["in 1871", "1871"], "1871", 1.0, 1.0),  # the best of several
        (["in 1871"], "1871", 0.0, 2 / 3),
        (["grey granite"], "granite from the quarry", 0.0, 2 / 5),
        (["a b b"], "b b c", 0.0, 4 / 5),  # the article a goes; both have b twice
        (["b b"], "b", 0.0, 2 / 3),  # bags, not sets
        ([], "", 1.0, 1.0),
        ([], "something", 0.0, 0.0),
        (["something"], "", 0.0, 0.0),
        (["the", "an"], "", 1.0, 1.0),  # no gold answer is left, so nothing is right
        (["the", "tree"], "", 0.0, 0.0),
        ([], "the", 1.0, 1.0),
        (["U.S."], "us", 1.0, 1.0),
        (["twenty-one"], "twentyone", 1.0, 1.0),
        (["Anna"], "the Anna", 1.0, 1.0),  # an within a word stays
    ],
)
def test_scores_are_the_official_ones(golds: list[str], answer: str, exact: float, overlap: float) -> None:
    assert scores(golds, answer) == pytest.approx((exact, overlap))
    assert plain_scores(golds, answer) == pytest.approx((exact, overlap))


WORD = st.sampled_from(
    ["the", "a", "an", "The", "tree", "Tree.", "two", "two,", "an-the", "U.S.", "ham", "''", " ", "-"]
)
PHRASE = st.lists(WORD, max_size=5).map(" ".join)


@given(st.lists(PHRASE, max_size=3), PHRASE)
def test_scores_agree_with_an_independent_implementation(golds: list[str], answer: str) -> None:
    assert scores(golds, answer) == pytest.approx(plain_scores(golds, answer))
    assert normalised(answer).split() == plain_words(answer)


def question(name: str, *golds: str) -> Question:
    return Question(name, "?", "context", tuple(Answer(gold, 0) for gold in golds))


def test_the_table_has_all_and_both_parts() -> None:
    asked = [question("one", "a tree"), question("two", "two trees"), question("three"), question("four")]
    found = score_predictions(asked, {"one": "Tree", "two": "trees", "three": "", "four": "tree"})
    assert found == pytest.approx(
        {
            "exact": 50.0, "f1": 100 * (1 + 2 / 3 + 1) / 4, "total": 4,
            "HasAns_exact": 50.0, "HasAns_f1": 100 * (1 + 2 / 3) / 2, "HasAns_total": 2,
            "NoAns_exact": 50.0, "NoAns_f1": 50.0, "NoAns_total": 2,
        }
    )  # fmt: skip
    assert "NoAns_f1" not in score_predictions(asked[:1], {"one": "x"})
    with pytest.raises(DataError, match=r"1 of 4 questions have no prediction, as four"):
        score_predictions(asked, {"one": "", "two": "", "three": ""})


# ---- the file


def squad_file(path: Path, *qas: dict[str, Any], context: str = "The cat sat on the mat in 1871.", **top: Any) -> Path:
    content = {
        "version": "v2.0",
        "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(qas)}]}],
        **top,
    }
    path.write_text(json.dumps(content))
    return path


def asked(name: str, *answers: tuple[str, int], **fields: Any) -> dict[str, Any]:
    golds = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": "Who sat?", "answers": golds, "is_impossible": not golds, **fields}


def test_the_sample_has_all_kinds_of_questions() -> None:
    found = read_questions(SAMPLE).all
    assert len(found) == 30
    assert sum(not question.answers for question in found) == 7
    assert max(len(question.answers) for question in found) == 3


def test_the_official_layout_is_read(tmp_path: Path) -> None:
    plausible = asked("b", plausible_answers=[{"text": "mat", "answer_start": 19}])
    found = read_questions(squad_file(tmp_path / "f.json", asked("a", ("The cat", 0), ("cat", 4)), plausible)).all
    assert [(q.id, q.golds) for q in found] == [("a", ("The cat", "cat")), ("b", ())]


@pytest.mark.parametrize(
    ("qas", "message"),
    [
        (
            [asked("a", ("dog", 4))],
            r"the answer 'dog' of question a is not at character 4 of its .* has 'cat'",
        ),
        ([asked("a", ("cat", 4)), asked("a")], r"has the id a twice"),
        ([asked("a", is_impossible=False)], r"question a has no answers and is not is_impossible"),
        ([{"id": "a", "is_impossible": False, "answers": []}], r"question a has no question; mend the file"),
        (["hello"], r'an entry of qas is "hello" instead of an object'),
        ([asked("a", ("cat", "abc"))], r'answer_start of an answer of question a is "abc", not a number'),  # type: ignore[arg-type]
        ([asked("a", ("cat", True))], r"answer_start of an answer of question a is true, not a number"),
        ([asked("a", (None, 4))], r"text of an answer of question a is null, not text"),  # type: ignore[arg-type]
        ([asked("a", ("t", -27))], r"the answer 't' of question a is not at character -27"),
        ([asked("a", question=None)], r"question of question a is null, not text"),
        ([{"question": "who?", "is_impossible": True}], r'the question "who\?" has no id'),
        ([], r"has no question that can be used"),
    ],
)
def test_bad_questions_are_refused(tmp_path: Path, qas: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(squad_file(tmp_path / "f.json", *qas))


def test_version_1_1_is_told_apart(tmp_path: Path) -> None:
    old = asked("a", ("cat", 4))
    del old["is_impossible"]
    path = squad_file(tmp_path / "train-v1.1.json", old, version="1.1")
    with pytest.raises(DataError, match=r"is SQuAD 1.1: question a does not say .* or set data.version=1.1"):
        read_questions(path)
    assert read_questions(path, version="1.1").all[0].golds == ("cat",)
    with pytest.raises(ConfigError, match=r"data.version=3 is unknown"):
        read_questions(path, version="3")


def test_misplaced_answers_are_left_out_only_when_told_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = squad_file(tmp_path / "f.json", asked("a", ("dog", 4)), asked("b", ("cat", 4)))
    found = read_questions(path, skip_misplaced=True)
    assert ([q.id for q in found.all], found.misplaced) == (["b"], found.misplaced)
    assert [(question.id, question.placed) for question in found.misplaced] == [("a", False)]
    data = SquadData(train_file=str(path), val_file=str(path), skip_misplaced=True, vocabulary=str(EMBEDDED))
    with caplog.at_level("WARNING"):
        data.setup("fit")
    assert "1 questions left out of training" in caplog.text
    assert len(data.train_set) == 1  # type: ignore[arg-type]
    scores = SquadEvaluation()(BertQuestionAnswering(size="tiny"), data, tmp_path)
    assert sorted(json.loads((tmp_path / "predictions.json").read_text())) == ["a", "b"]
    assert scores["exact"] <= 100


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.json is no file"):
        read_questions(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(DataError, match=r"bad.json is no JSON in UTF-8"):
        read_questions(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(DataError, match=r"bad.json has no list called data"):
        read_questions(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": [{"qas": [{}]}]}]}')
    with pytest.raises(DataError, match=r"not laid out as SQuAD is: a paragraph of article 0 has no context"):
        read_questions(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text('{"data": [{"paragraphs": [{"context": null, "qas": [{}]}]}]}')
    with pytest.raises(DataError, match=r"context of a paragraph of article 0 is null, not text; mend"):
        read_questions(tmp_path / "bad.json")
    (tmp_path / "bad.json").write_text('{"data": [3]}')
    with pytest.raises(DataError, match=r"article 0 is 3 instead of an object"):
        read_questions(tmp_path / "bad.json")
    with pytest.raises(DataError, match=r"data.root=/no/such is no folder"):
        SquadData(root="/no/such")
    with pytest.raises(DataError, match=r"train-v2.0.json does not exist; put train-v2.0.json there"):
        SquadData(root=str(tmp_path))
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        squad_file(tmp_path / name, asked("a"))
    with pytest.raises(DataError, match=r"data.vocabulary is null, and the embedded vocabulary knows"):
        SquadData(root=str(tmp_path))


def test_one_file_is_enough_to_evaluate(tmp_path: Path) -> None:
    """Of an empty paragraph too, about which nothing can be said: odds are numbers that JSON has."""
    path = squad_file(tmp_path / "mine.json", asked("a"), context="")
    data = SquadData(val_file=str(path), vocabulary=str(EMBEDDED))
    SquadEvaluation()(BertQuestionAnswering(size="tiny"), data, tmp_path)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"a": ""}
    assert math.isfinite(json.loads((tmp_path / "null_odds.json").read_text())["a"])
    with pytest.raises(DataError, match=r"to train, set data.train_file to a file as train-v2.0.json"):
        data.setup("fit")
    with pytest.raises(DataError, match=r"data.val_file is null and so is data.root"):
        SquadData(train_file=str(path))


# ---- windows and answers


@pytest.mark.parametrize("stride", [5, 17, 40])
@pytest.mark.parametrize("window", [64, 128])
def test_windows_cover_every_paragraph_and_hold_the_answers(window: int, stride: int) -> None:
    questions = read_questions(SAMPLE).all
    vocabulary = read_vocabulary(None)
    rule = WindowRule(window=window, stride=min(stride, window - 23), question=20)
    windows, tally = make_windows(questions, vocabulary, rule)
    assert (tally.questions, tally.windows, tally.long_questions, tally.whole_nowhere) == (30, len(windows), 0, 0)
    assert tally.long_contexts == (30 if window == 64 else 0)
    for place, asked_question in enumerate(questions):
        own = [entry for entry in windows if entry.question == place]
        assert all(len(entry.ids) <= window for entry in own)
        seen = {tuple(offset) for entry in own for offset in entry.offsets.tolist()}
        whole = vocabulary.tokenizer().encode(asked_question.context).offsets
        assert seen == set(whole)
        assert tuple(own[-1].offsets[-1]) == whole[-1]
        answered = [entry for entry in own if entry.start]
        assert bool(answered) == bool(asked_question.answers)
        for entry in answered:
            begin = entry.offsets[entry.start - entry.context_from, 0]
            end = entry.offsets[entry.end - entry.context_from, 1]
            assert asked_question.context[begin:end] == asked_question.answers[0].text


def test_what_does_not_fit_is_counted() -> None:
    long = Question("a", "who " * 30, "the cook " * 60, (Answer("the cook " * 40, 0),))
    windows, tally = make_windows([long], read_vocabulary(None), WindowRule(window=40, stride=8, question=10))
    assert (tally.long_questions, tally.long_contexts, tally.whole_nowhere) == (1, 1, 1)
    assert all(entry.start == entry.end == 0 for entry in windows)
    with pytest.raises(ConfigError, match=r"data.window=20 leaves 7 tokens of context .* data.stride=8"):
        WindowRule(window=20, stride=8, question=10)


def test_samples_are_filled_up() -> None:
    data = SquadData(window=160, stride=32, question=20)
    data.setup("fit")
    sample = data.val_set[4]
    used = int(sample["input_mask"].sum())
    ids = sample["input_ids"].tolist()
    assert len(ids) == 160
    assert not any(ids[used:])
    first_end = ids.index(data.vocabulary.ids["[SEP]"])
    assert sample["segment_ids"].tolist() == [0] * (first_end + 1) + [1] * (used - first_end - 1) + [0] * (160 - used)


def window_of(tokens: int, *, context_from: int = 3, question: int = 0) -> Window:
    offsets = np.array([[2 * k, 2 * k + 1] for k in range(tokens)], np.int32)
    return Window(question, np.zeros(context_from + tokens + 1, np.int32), context_from, offsets, 0, 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("longest", [1, 3, 30])
def test_the_answer_is_the_best_of_all_spans(seed: int, longest: int) -> None:
    """Against looking at every pair; the context has one letter a token."""
    random = np.random.default_rng(seed)
    context = "a b c d e f g h"
    given_windows = [
        (entry, *(random.normal(size=len(entry.ids)).astype(np.float32) for _ in range(2)))
        for entry in (window_of(8), window_of(5, context_from=4))
    ]
    best = max(
        (float(starts[f + i] + ends[f + j]), context[2 * i : 2 * j + 1])
        for entry, starts, ends in given_windows
        for f in [entry.context_from]
        for i in range(len(entry.offsets))
        for j in range(i, min(i + longest, len(entry.offsets)))
    )
    nothing = min(float(starts[0] + ends[0]) for _, starts, ends in given_windows)
    rule = AnswerRule(candidates=20, longest=longest, null_threshold=nothing - best[0])
    found = choose_answer(context, given_windows, rule, unanswerable=True)
    assert found.text == best[1]
    assert found.null_odds == pytest.approx(nothing - best[0], abs=1e-6)
    lower = AnswerRule(candidates=20, longest=longest, null_threshold=nothing - best[0] - 0.01)
    assert choose_answer(context, given_windows, lower, unanswerable=True).text == ""
    assert choose_answer(context, given_windows, lower, unanswerable=False).text == best[1]


# ---- the whole


class Oracle(BertQuestionAnswering):
    """Knows the right spans."""

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        length = batch["input_ids"].shape[1]
        starts, ends = (5.0 * torch.nn.functional.one_hot(batch[name], length).float() for name in ("start", "end"))
        return starts, ends


@pytest.mark.parametrize("window", [64, 128])
def test_right_spans_have_full_marks_and_the_official_files_are_written(tmp_path: Path, window: int) -> None:
    data = SquadData(window=window, stride=20, question=20, batch_size=7)
    evaluation = SquadEvaluation()
    found = evaluation(Oracle(size="tiny", layers=1, hidden=8), data, tmp_path / "out")
    assert (evaluation.title, evaluation.main_metric) == ("SQuAD", "f1")
    assert found["f1"] == found["exact"] == 100.0
    assert found.keys() == {"exact", "f1", "HasAns_f1", "NoAns_f1"}
    predictions = json.loads((tmp_path / "out" / "predictions.json").read_text())
    golds = {question.id: question for question in read_questions(SAMPLE).all}
    assert predictions.keys() == golds.keys()
    assert all(text in (golds[name].golds or ("",)) for name, text in predictions.items())
    odds = json.loads((tmp_path / "out" / "null_odds.json").read_text())
    assert all((odds[name] > 0) == (not golds[name].answers) for name in golds)
    written = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert (written["total"], written["HasAns_total"], written["NoAns_total"]) == (30, 23, 7)
    assert found.items() <= written.items()
    with pytest.raises(ConfigError, match=r"evaluation=squad is for recipe=bert_squad .* not for a BertPretraining"):
        evaluation(BertPretraining(size="tiny", layers=1, hidden=8), data, tmp_path)


@pytest.mark.slow
def test_the_sample_is_learnt_by_heart(tmp_path: Path) -> None:
    """The recipe as it stands, from text to spans and back."""
    L.seed_everything(1)
    data = SquadData(window=128, stride=48, question=32, batch_size=8)
    model = BertQuestionAnswering(size="tiny", positions=128, dropout=0.0, lr=1e-3)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=60, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    assert SquadEvaluation()(model, data, tmp_path)["f1"] >= 95.0
