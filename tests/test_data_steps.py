"""The last steps of `pl-pipe data prepare`, vocabulary and shards: from archives on a server to a recipe's batch."""

import bz2
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from file_server import Shelf, serving
from hydra import initialize_config_module
from test_data_preparation import packed

from pl_pipe.cli.assemble import build_data
from pl_pipe.cli.front import prepare_hydra
from pl_pipe.recipes.language.squad_format import SAMPLE
from pl_pipe.recipes.translation.vocabulary import read_vocabulary
from tests.conftest import Inside
from tests.test_configs import composed

pytest.importorskip("tokenizers", reason="of the text extra")
h5py = pytest.importorskip("h5py", reason="of the text extra")

ENGLISH = [f"this is sentence {number} of the training text" for number in range(40)]
GERMAN = [f"das ist satz {number} des textes für das üben" for number in range(40)]


def batch_of(printed: str, *settings: str, output: Path) -> Any:
    """A batch of the data set that the printed `pl-pipe fit` line reads."""
    line = re.search(r"Next: pl-pipe fit (.*?)\.?$", printed.replace(". ", "\n"), re.MULTILINE)
    assert line is not None, printed
    prepare_hydra("fit")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        data = build_data(composed(*line[1].split(), *settings, output=output))
        data.setup("fit")
        return next(iter(data.train_dataloader()))


def text(lines: list[str]) -> bytes:
    return "\n".join(lines).encode()


def segments(lines: list[str]) -> bytes:
    return "\n".join(f'<seg id="1">{line}</seg>' for line in lines).encode()


@pytest.fixture
def wmt() -> Shelf:
    return Shelf(
        {
            "training-parallel-europarl-v7.tgz": packed(
                {"training/europarl-v7.de-en.en": text(ENGLISH), "training/europarl-v7.de-en.de": text(GERMAN)}
            ),
            "training-parallel-commoncrawl.tgz": packed(
                {"commoncrawl.de-en.en": b"common", "commoncrawl.de-en.de": b"gemein"}
            ),
            "training-parallel-nc-v11.tgz": packed(
                {f"training-parallel-nc-v11/news-commentary-v11.de-en.{language}": b"news" for language in ("en", "de")}
            ),
            "wmt13-test.tgz": packed(
                {f"test/newstest2013-src.{language}.sgm": segments(ENGLISH[:3]) for language in ("en", "de")}
            ),
            "wmt14-test-full.tgz": packed(
                {
                    "test-full/newstest2014-deen-src.en.sgm": segments(ENGLISH[:2]),
                    "test-full/newstest2014-deen-ref.de.sgm": segments(GERMAN[:2]),
                }
            ),
        }
    )


def test_wmt_gets_a_vocabulary_and_can_be_trained_on(inside: Inside, wmt: Shelf, tmp_path: Path) -> None:
    root = tmp_path / "wmt"
    settings = ["prepare.verify=false", "prepare.vocabulary.settings.size=300", f"data.root={root}"]
    with serving(wmt) as shelf:
        code, out, err = inside("data", "prepare", "wmt_ende", *settings, f"prepare.mirror={shelf.url}")
    assert code == 0, err
    vocabulary = read_vocabulary(root / "vocabulary.json")
    assert vocabulary.size == 300
    first = {line: len(vocabulary.encode([line])[0]) for line in (ENGLISH[7], GERMAN[7], "unheard-of words")}
    assert first[ENGLISH[7]] < len(ENGLISH[7]) / 2, "no merge of the English was learnt"
    assert first[GERMAN[7]] < len(GERMAN[7]) / 2, "no merge of the German was learnt"
    assert "data.val=newstest2013 data.test=newstest2014" in out
    assert "data.vocabulary_size=300" in out
    source, lengths, target = batch_of(out, "data.batch_size=4", f"data.cache={tmp_path / 'cache'}", output=tmp_path)
    assert len(source) == len(lengths) == len(target) == 4


def test_too_small_a_vocabulary_is_told_by_its_setting(inside: Inside, wmt: Shelf, tmp_path: Path) -> None:
    settings = ["prepare.verify=false", "prepare.vocabulary.settings.size=100", f"data.root={tmp_path / 'wmt'}"]
    with serving(wmt) as shelf:
        code, _, err = inside("data", "prepare", "wmt_ende", *settings, f"prepare.mirror={shelf.url}")
    assert code == 1
    assert "prepare.vocabulary.settings.size=100 leaves no room" in err


def page(number: int) -> str:
    lines = "\n".join(f"The {number}. article has a paragraph {line} of words. It goes on here." for line in range(5))
    return f"<page><title>{number}</title><ns>0</ns><revision><text>{lines}</text></revision></page>"


def test_wiki_becomes_shards_that_can_be_trained_on(inside: Inside, tmp_path: Path) -> None:
    name = "testwiki-latest-pages-articles.xml.bz2"
    dump = bz2.compress(f"<mediawiki>{''.join(map(page, range(30)))}</mediawiki>".encode())
    sums = f"{hashlib.md5(dump).hexdigest()}  {name}\n".encode()
    shards = tmp_path / "wiki" / "shards"
    settings = {"shards": 2, "sequence_length": 32, "most_masked": 5, "vocabulary_size": 120}
    arguments = [f"prepare.shards.settings.{key}={value}" for key, value in settings.items()]
    with serving(Shelf({name: dump, "testwiki-latest-md5sums.txt": sums})) as shelf:
        arguments += ["prepare.dump=testwiki", f"prepare.mirror={shelf.url}", f"data.root={shards.parent}"]
        code, out, err = inside("data", "prepare", "wiki", *arguments)
        assert code == 0, err
        again = inside("data", "prepare", "wiki", *arguments)
    assert (again[0], "nothing to do" in again[1]) == (0, True)
    assert "30 documents, " in out
    assert sorted(path.name for path in shards.glob("train*")) == ["train_000.hdf5", "train_001.hdf5"]
    with h5py.File(shards / "train_000.hdf5") as file:
        assert file["input_ids"].shape[1:] == (32,)
        assert file["masked_lm_ids"].shape[1:] == (5,)
        words = (shards / "vocab.txt").read_text().splitlines()
        assert file["input_ids"][...].max() < len(words) <= 120
        assert words[file["input_ids"][0, 0]] == "[CLS]"
    batch = batch_of(out, "data.batch_size=4", "data.num_workers=0", output=tmp_path)
    assert batch["input_ids"].shape == (4, 32)
    (shards / "train_000.hdf5").unlink()
    (shards / "mine.txt").write_text("stays")
    code, out, err = inside("data", "prepare", "wiki", *arguments)
    assert code == 0, err
    assert batch_of(out, "data.batch_size=4", "data.num_workers=0", output=tmp_path)["input_ids"].shape == (4, 32)
    assert [(shards / name).is_file() for name in ("train_000.hdf5", "train_001.hdf5", "mine.txt")] == [True] * 3
    code, _, err = inside("data", "prepare", "wiki", *arguments, "prepare.shards.settings.shards=3")
    assert (code, "shards holds files of another make" in err) == (1, True)


def test_squad_gets_a_vocabulary_and_can_be_trained_on(inside: Inside, tmp_path: Path) -> None:
    content = SAMPLE.read_bytes()
    arguments = ["prepare.verify=false", "prepare.vocabulary.settings.size=300", f"data.root={tmp_path / 'squad'}"]
    with serving(Shelf({"train-v2.0.json": content, "dev-v2.0.json": content})) as shelf:
        code, out, err = inside("data", "prepare", "squad", *arguments, f"prepare.mirror={shelf.url}")
    assert code == 0, err
    words = (tmp_path / "squad" / "vocab.txt").read_text().splitlines()
    assert len(words) == 300
    assert "the" in words
    assert batch_of(out, "data.batch_size=4", output=tmp_path)["input_ids"].shape == (4, 384)
    (tmp_path / "squad" / "vocab.txt").write_text("of a model\n")
    arguments[1] = "prepare.vocabulary.settings.size=400"
    code, out, err = inside("data", "prepare", "squad", *arguments)
    assert (code, "vocab.txt is there already and stays" in out) == (0, True), err
    assert (tmp_path / "squad" / "vocab.txt").read_text() == "of a model\n"
    (tmp_path / "squad" / "vocab.txt").unlink()
    code, _, err = inside("data", "prepare", "squad", *arguments[::2], "prepare.vocabulary.settings.size=3")
    assert (code, "prepare.vocabulary.settings.size=3 leaves no room" in err) == (1, True)
