"""From a trained translator to BLEU: the evaluation by itself, and the commands as a user calls them."""

import csv
import json
import os
from pathlib import Path

import pytest
import sacrebleu
import torch

from pl_pipe.errors import ConfigError, DataError
from pl_pipe.recipes.translation.evaluation import BleuEvaluation
from pl_pipe.recipes.translation.numbers import numbers_data
from pl_pipe.recipes.translation.parallel_text import parallel_text_data
from pl_pipe.recipes.translation.translator import Translator
from pl_pipe.recipes.vision.digits import DigitsData
from tests.conftest import ROOT, Inside

NARROW = ("recipe.hidden_size=8", "recipe.encoder_layers=2", "recipe.decoder_layers=2")
SHORT = "evaluation.max_length_factor=0.1"  # what has learnt nothing finds no end
FEW = ("data.sentences=24", "data.held_out_sentences=6", "data.batch_size=8", "data.vocabulary_size=300")


def translator(vocabulary_size: int = 300) -> Translator:
    torch.manual_seed(0)
    return Translator(vocabulary_size, encoder_layers=2, decoder_layers=2, hidden_size=8).eval()


class Parrot(BleuEvaluation):
    """Translates as told; only what comes after is under test."""

    says: list[str]

    def translate(self, lines: object, model: object, vocabulary: object) -> list[str]:  # type: ignore[override]
        return self.says


def test_the_score_is_sacrebleus(tmp_path: Path) -> None:
    data = numbers_data(cache=str(tmp_path), vocabulary_size=300, held_out_sentences=20)
    references = [target for _, target in data.corpora["test"].pairs()]
    parrot = Parrot()
    parrot.says = [*references[:15], *reversed(references[15:])]
    metrics = parrot(translator(), data, tmp_path)
    assert metrics["BLEU"] == pytest.approx(sacrebleu.corpus_bleu(parrot.says, [references]).score)
    assert 20 < metrics["BLEU"] < 100
    assert metrics["exact %"] == 100 * sum(a == b for a, b in zip(parrot.says, references, strict=True)) / 20
    assert (tmp_path / "translations.txt").read_text().splitlines() == parrot.says
    facts = json.loads((tmp_path / "bleu.json").read_text())
    assert facts["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert facts["signature"] in parrot.title
    parrot.says = references
    assert parrot(translator(), data, tmp_path)["BLEU"] == pytest.approx(100)


def test_translations_keep_their_order_whatever_the_batches(tmp_path: Path) -> None:
    data = numbers_data(cache=str(tmp_path), vocabulary_size=300, sentences=200, held_out_sentences=9)
    lines = [source for source, _ in data.corpora["test"].pairs()]
    lines.insert(4, "")
    model = translator()
    with torch.no_grad():
        model.network.classifier.weight.mul_(5)  # so that sentences differ in their translations
    found = [
        BleuEvaluation(beam_size=2, batch_size=size, max_length_factor=0.5).translate(lines, model, data.vocabulary)
        for size in (1, 4, 100)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][4] == "", "an empty line's translation is empty, and keeps its place"
    assert len(set(found[0])) > 4


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    data = numbers_data(cache=str(tmp_path), sentences=200, vocabulary_size=300)
    BleuEvaluation(beam_size=1, limit=3, max_length_factor=0.1)(translator(), data, tmp_path)
    assert len((tmp_path / "translations.txt").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "wrong",
    [{"beam_size": 0}, {"limit": 0}, {"tokenize": "words"}, {"coverage_penalty": -0.1}, {"max_length_factor": 0}],
    ids=str,
)
def test_settings_out_of_range_are_named(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"evaluation.{next(iter(wrong))}="):
        BleuEvaluation(**wrong)  # type: ignore[arg-type]


def test_what_is_no_translation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="scores a translator on parallel text, not Translator on DigitsData"):
        BleuEvaluation()(translator(), DigitsData(), tmp_path)
    for language in ("en", "de"):
        (tmp_path / f"train.{language}").write_text("a\n")
    data = parallel_text_data(root=str(tmp_path), cache=str(tmp_path))
    with pytest.raises(DataError, match=r"nothing to translate; give data.source="):
        BleuEvaluation()(translator(), data, tmp_path)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_a_run_and_its_bleu_by_epoch(
    inside: Inside, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(cache))
    code, _, err = inside("fit", "recipe=gnmt8", *NARROW, *FEW, "trainer.max_epochs=2", "hydra.run.dir=run")
    assert code == 0, err
    run = tmp_path / "run"
    assert {file.name for file in (run / "checkpoints").iterdir()} == {
        "best.ckpt", "epoch_000.ckpt", "epoch_001.ckpt", "last.ckpt",
    }  # fmt: skip
    assert (run / "vocabulary.json").is_file()
    code, out, err = inside("evaluate", "run", SHORT, "evaluation.beam_size=2")
    assert code == 0, err
    rows = list(csv.DictReader((run / "evaluation" / "evaluation.csv").open()))
    assert [(row["checkpoint"], row["epoch"], row["step"]) for row in rows] == [
        ("epoch_000", "0", "3"), ("epoch_001", "1", "6"),
    ]  # fmt: skip
    assert (run / "evaluation" / "evaluation.png").is_file()
    assert len((run / "evaluation" / "epoch_001" / "translations.txt").read_text().splitlines()) == 6
    assert "tok:13a" in out
    # Other text, with the vocabulary that the checkpoint brings; no corpus to train one on is needed.
    (tmp_path / "some.en").write_text("seven\nforty-two, nine\n")
    (tmp_path / "some.de").write_text("sieben\nzweiundvierzig, neun\n")
    other = ["data=parallel_text", "data.source=some.en", "data.reference=some.de", "data.vocabulary_size=300"]
    code, _, err = inside("evaluate", "run", "ckpt_path=run/checkpoints/last.ckpt", SHORT, *other, "out=scores")
    assert code == 0, err
    assert len((tmp_path / "scores" / "last" / "translations.txt").read_text().splitlines()) == 2
    # A vocabulary of another corpus is refused before anything is translated.
    code, _, err = inside("evaluate", "run", "data.largest=500", SHORT, "out=wrong")
    assert code == 0, err  # the checkpoint's own is taken
    foreign = numbers_data(largest=150, vocabulary_size=300, cache=str(cache))
    (tmp_path / "foreign.json").write_text(foreign.vocabulary.text())
    code, _, err = inside("evaluate", "run", "data.vocabulary=foreign.json", "out=wrong")
    assert (code, "the checkpoint was trained with another vocabulary" in " ".join(err.split())) == (1, True)


def test_multi30k(tmp_path: Path) -> None:
    """The files as they are: every line is read, and comes back from its ids."""
    folder = Path(os.environ.get("PL_PIPE_TEST_DATA", ROOT.parent / "shared" / "data")) / "multi30k"
    if not folder.is_dir():
        pytest.skip("no multi30k; set PL_PIPE_TEST_DATA to the folder that holds it")
    settings = {"vocabulary_size": 2000, "vocabulary_lines": 5000, "max_length": 100, "cache": str(tmp_path)}
    data = parallel_text_data(root=str(folder), train="val", test="test_2016_flickr", **settings)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert len(data.train_dataloader().dataset) == 1014  # type: ignore[arg-type]
    pairs = list(data.corpora["test"].pairs())
    assert len(pairs) == 1000
    lines = [line for pair in pairs for line in pair]
    assert [data.vocabulary.decode(ids) for ids in data.vocabulary.encode(lines)] == [line.strip() for line in lines]
