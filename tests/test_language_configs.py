"""The language recipes as the command line builds them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Inside
from hydra import compose, initialize_config_module
from language_tasks import SMALL
from test_language_data import write_shard

from pl_pipe.cli.assemble import build, build_data, build_model
from pl_pipe.cli.front import prepare_hydra
from pl_pipe.recipes.language.squad_evaluation import SquadEvaluation
from pl_pipe.recipes.language.vocabulary import SPECIAL

FEW = [f"recipe.{name}={value}" for name, value in SMALL.items() if name not in ("lr", "warmup_steps", "positions")]
QUIET = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "logger=none"]


@pytest.fixture
def hydra() -> Iterator[None]:
    prepare_hydra("fit")
    with initialize_config_module("pl_pipe.conf", version_base="1.3"):
        yield


def test_every_recipe_takes_its_data(hydra: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch of the data goes through the model; weights of full size are on the meta device and cost nothing."""
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, *(f"w{k}" for k in range(95))]))
    write_shard(tmp_path / "train.hdf5", rows=range(40))
    wiki = ["data=wiki", f"data.root={tmp_path}", "data.num_workers=0"]
    for overrides, words in (
        (["recipe=bert"], 544),
        (["recipe=bert", *wiki, "recipe.size=base"], 30522),
        (["recipe=bert", *wiki, "recipe.size=medium", f"data.vocabulary={tmp_path}/vocab.txt"], 100),
        (["recipe=bert_squad"], 544),
        (["recipe=transformer_lm", "data.keep_vocabulary_in=null"], 80),
    ):
        cfg = compose("config", [*overrides, "data.batch_size=2"])
        assert cfg.recipe.about.summary
        data = build_data(cfg)
        data.setup("fit")
        batch = next(iter(data.train_dataloader()))
        with torch.device("meta"):
            model = build_model(cfg)
        table = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        assert table.num_embeddings == words
        if isinstance(batch, dict):
            outputs = model({name: value.to("meta") for name, value in batch.items()})
            assert all(len(output) == 2 for output in outputs)
        else:
            assert model(batch[0].to("meta")).shape == (2, 32, 80)


def test_answers_are_scored_by_the_official_rules(hydra: None) -> None:
    cfg = compose("config", ["recipe=bert_squad", "evaluation.longest=7"])
    evaluation = build(cfg.evaluation, what="evaluation", expect=SquadEvaluation)
    assert evaluation.rule.longest == 7


@pytest.mark.parametrize(
    "recipe", ["bert_squad", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "transformer_lm"))]
)
def test_a_new_user_trains_it(inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setenv("PL_PIPE_CACHE", str(tmp_path / "cache"))
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
    code, out, err = inside("fit", f"recipe={recipe}", *FEW, *short, *QUIET)
    assert code == 0, err
    assert "finished: 2 steps" in out + err
    (run,) = (tmp_path / "outputs" / recipe).iterdir()
    code, _, err = inside("validate", str(run), "ckpt_path=best", *QUIET[:2])
    assert code == 0, err
    assert (run / "checkpoints" / "best.ckpt").is_file()


def test_the_documents_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "language.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    assert len(json.loads((tmp_path / "answers" / "predictions.json").read_text())) == 30


def test_a_recipe_and_data_that_do_not_go_together_are_one_message(inside: Inside) -> None:
    code, _, err = inside("fit", "recipe=gnmt8", "data=squad")
    assert code == 1
    assert "recipe=gnmt8 does not go together with data=squad" in err
    assert "data=numbers, parallel_text, bpe_text" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_checkpoint_of_another_vocabulary_is_one_message(
    inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "train.hdf5", rows=range(40))
    words = [*SPECIAL, *(f"w{k}" for k in range(95))]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "other.txt").write_text("\n".join([*words[:50], *reversed(words[50:])]))
    wiki = ["recipe=bert", "data=wiki", f"data.root={tmp_path}", "data.num_workers=0", "data.batch_size=8"]
    code, _, err = inside("fit", *wiki, f"data.vocabulary={tmp_path}/vocab.txt", "trainer.max_epochs=1", *FEW, *QUIET)
    assert code == 0, err
    (run,) = (tmp_path / "outputs" / "bert").iterdir()
    code, _, err = inside(
        "validate",
        *wiki,
        f"data.vocabulary={tmp_path}/other.txt",
        f"ckpt_path={run}/checkpoints/last.ckpt",
        *FEW,
        *QUIET,
    )
    assert code == 1
    assert "another vocabulary (100 tokens" in err
    assert "set data.vocabulary to the vocab.txt that it was trained with" in err.replace("\n", " ")
    assert "Traceback" not in err
