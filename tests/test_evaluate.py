"""`pl-pipe evaluate`: every checkpoint of a directory is loaded, scored by the recipe's own class, and reported."""

import csv
from pathlib import Path

import pytest
import torch

from tests.conftest import Inside, only_run

EVALUATION = """
import json
import torch

class Size:
    title = "Size of the weights"
    main_metric = "size"

    def __init__(self, scale=1.0, main_metric="size"):
        self.scale, self.main_metric = scale, main_metric

    def __call__(self, model, datamodule, out):
        assert not model.training and torch.is_inference_mode_enabled()
        size = self.scale * sum(float(p.abs().sum()) for p in model.parameters())
        samples = sum(len(labels) for _, labels in datamodule.test_dataloader())
        (out / "answer.json").write_text(json.dumps(size))
        return {"samples": samples, "size": size}
"""


@pytest.fixture
def folder(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained run, and beside it a package and a configuration of an evaluation."""
    (copied / "measures_of_mine.py").write_text(EVALUATION)
    (copied / "conf" / "evaluation").mkdir(parents=True)
    (copied / "conf" / "evaluation" / "size.yaml").write_text("_target_: measures_of_mine.Size\nscale: 1.0\n")
    monkeypatch.syspath_prepend(str(copied))
    return copied


def of_epochs(run: Path, epochs: int) -> dict[str, float]:
    """Writes a checkpoint for each epoch, with weights of their own; the sum of the weights by file name."""
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    parameters = [name for name in content["state_dict"] if name.startswith("network")]
    sizes = {}
    for epoch in range(epochs):
        state = dict(content["state_dict"])
        for name in parameters:
            state[name] = state[name] * (epoch + 2)
        changed = content | {"state_dict": state, "epoch": epoch, "global_step": 6 * (epoch + 1)}
        torch.save(changed, run / "checkpoints" / f"epoch_{epoch}.ckpt")
        sizes[f"epoch_{epoch}"] = sum(float(state[name].abs().sum()) for name in parameters)
    return sizes


def rows(file: Path) -> list[dict[str, str]]:
    with file.open() as opened:
        return list(csv.DictReader(opened))


def test_a_run_is_scored_checkpoint_by_checkpoint(inside: Inside, folder: Path) -> None:
    run = only_run(folder)
    sizes = of_epochs(run, 3)
    code, out, err = inside("evaluate", str(run), "--config-dir", "conf", "evaluation=size", cwd=folder)
    assert code == 0, err
    found = rows(run / "evaluation" / "evaluation.csv")
    # The run ended at epoch 1, step 12: its last.ckpt (and best.ckpt, at epoch 0 or 1) are epoch files' twins.
    assert [(row["checkpoint"], row["epoch"], row["step"]) for row in found] == [
        ("epoch_0", "0", "6"), ("epoch_1", "1", "12"), ("epoch_2", "2", "18"),
    ]  # fmt: skip
    for row in found:
        assert float(row["size"]) == pytest.approx(sizes[row["checkpoint"]], rel=1e-5)
        assert float(row["samples"]) == 20
        assert (run / "evaluation" / row["checkpoint"] / "answer.json").is_file()
    assert (run / "evaluation" / "evaluation.png").stat().st_size > 1000
    assert "Size of the weights" in out
    assert "epoch_1" in out


def test_one_file_and_a_folder_of_ones_own(inside: Inside, folder: Path) -> None:
    run = only_run(folder)
    last = run / "checkpoints" / "last.ckpt"
    before = set((folder / "outputs" / "vgg16").iterdir())
    overrides = ["--config-dir", "conf", "evaluation=size", "evaluation.scale=0", "out=scores"]
    code, _, err = inside("evaluate", str(run), f"ckpt_path={last}", *overrides, cwd=folder)
    assert code == 0, err
    (row,) = rows(folder / "scores" / "evaluation.csv")
    assert (row["checkpoint"], float(row["size"])) == ("last", 0.0)
    assert not (folder / "scores" / "evaluation.png").exists()
    assert not (run / "evaluation").exists()
    assert set((folder / "outputs" / "vgg16").iterdir()) == before


def test_a_checkpoint_folder_of_several_devices_needs_one(inside: Inside, folder: Path) -> None:
    """What a run was trained on does not matter; nor does a folder that is no run's."""
    run = only_run(folder)
    (run / "checkpoints").rename(folder / "kept")
    (folder / "kept" / "best.ckpt").unlink()
    settings = ["data=synthetic", "data.num_val_samples=20", "recipe.width=0.01", "trainer.devices=4", "strategy=ddp"]
    arguments = ["--config-dir", "conf", "evaluation=size", "ckpt_path=kept", "out=scores", *settings]
    code, _, err = inside("evaluate", *arguments, cwd=folder)
    assert code == 0, err
    assert [row["checkpoint"] for row in rows(folder / "scores" / "evaluation.csv")] == ["last"]
    assert list((folder / "outputs" / "vgg16").iterdir()) == [run], "an empty folder of the evaluation stays behind"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["data=synthetic", "ckpt_path=last"], "recipe=vgg16 has no evaluation of its own; pl-pipe validate"),
        (["evaluation=size"], "evaluate needs trained weights"),
        (["evaluation=size", "recipe.width=0.02", "CKPT"], "belongs to another model"),
        *(
            pytest.param(arguments, says, marks=pytest.mark.slow)
            for arguments, says in (
                (["evaluation=size", "ckpt_path=conf"], "conf holds no checkpoint (*.ckpt)"),
                (["evaluation=size", "+evaluation.main_metric=bleu", "CKPT"], "names 'bleu' as its main metric"),
                (["evaluation=size", "ckpt_path=nowhere"], "ckpt_path=nowhere does not exist"),
                (["evaluation=size", "CKPT", "out=measures_of_mine.py"], "is a file, where a folder is to be made"),
                (["+evaluation._target_=collections.OrderedDict", "CKPT"], "which is no evaluation"),
            )
        ),
    ],
    ids=["none", "no weights", "foreign", "empty", "metric", "absent", "out", "no evaluation"],
)
def test_what_cannot_be_scored_is_refused(inside: Inside, folder: Path, arguments: list[str], says: str) -> None:
    run = only_run(folder)
    last = f"ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    settings = ["data=synthetic", "data.num_val_samples=20", "recipe.width=0.01"]
    given = [last if token == "CKPT" else token for token in arguments]
    code, _, err = inside("evaluate", "--config-dir", "conf", *settings, *given, cwd=folder)
    assert code == 1
    assert says in " ".join(err.split())


def test_it_is_among_the_commands(inside: Inside) -> None:
    assert "evaluate" in inside("--help")[1]
    code, out, _ = inside("evaluate", "--cfg", "job")
    assert (code, "evaluation:" in out) == (0, True)
