"""Every wrong input ends in one clear message, exit code 1, no traceback, and nothing half-written."""

from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, Inside, only_run

CASES = {
    "unknown recipe": (["recipe=vgg17"], ["Could not find 'recipe/vgg17'", "resnet56", "vgg16"]),
    "unknown strategy": (["strategy=magic"], ["Could not find 'strategy/magic'", "ddp", "single"]),
    "unknown data set": (["data=mnist"], ["Could not find 'data/mnist'", "digits"]),
    "unknown experiment": (["experiment=x"], ["Could not find 'experiment/x'", "pipedream_vgg16"]),
    "unknown key": (["recipe.learning=1"], ["Key 'learning' not in 'ImageClassifierConfig'"]),
    "unknown trainer key": (["trainer.epochs=1"], ["Key 'epochs' not in 'TrainerConfig'"]),
    "wrong type": (["recipe.lr=fast"], ["Value 'fast' of type 'str' could not be converted to Float"]),
    "broken override": (["recipe.lr"], ["fit takes overrides such as recipe=vgg16, got 'recipe.lr'"]),
    "no root": (["data=imagenet"], ["data=imagenet reads files from disk; set data.root"]),
    "root missing": (["data=cifar10", "data.root=/no/such"], ["data.root=/no/such does not exist; set data.root"]),
    "root empty": (["data=imagenet", "data.root=empty"], ["data.root=empty is empty; set data.root"]),
    "no classes": (["data=imagenet", "data.root=bare"], ["bare/train has no class folders"]),
    "devices no number": (["trainer.devices=four"], ["trainer.devices='four' is not a positive number"]),
    "devices zero": (["trainer.devices=0"], ["trainer.devices=0 is not a positive number"]),
    "devices for single": (["trainer.devices=2"], ["strategy=single trains on 1 device", "strategy=ddp"]),
    "fsdp on cpu": (["strategy=fsdp", "trainer.accelerator=cpu"], ["strategy=fsdp runs on cuda, this run is on cpu"]),
    "precision": (["trainer.precision=7bit"], ["Lightning refuses the trainer's settings", "7bit", "bf16-mixed"]),
    "missing checkpoint": (["ckpt_path=no.ckpt"], ["ckpt_path=no.ckpt does not exist; it takes last, best or"]),
    "nothing to resume": (["ckpt_path=last"], ["no run of recipe=vgg16 data=digits under outputs has saved one"]),
    "not a checkpoint": (["ckpt_path=noise.ckpt"], ["noise.ckpt (3000 bytes) cannot be read: it is truncated or not"]),
    "foreign checkpoint": (["ckpt_path=foreign.ckpt"], ["has no state_dict, so Lightning did not write it"]),
    "bad interface": (["cluster.interface=no0"], ["cluster.interface=no0 is not a network interface", "lo"]),
    "bad batch size": (["data.batch_size=0"], ["data.batch_size=0 is too small; the least is 1"]),
    "unknown optimizer": (["recipe.optimizer=lion"], ["recipe.optimizer=lion is unknown; choose one of sgd"]),
    "monitor mode": (["monitor_mode=up"], ["monitor_mode=up is unknown; choose min or max"]),
    "seed": (["seed=-1"], ["seed=-1 is out of range; choose a number from 0 to"]),
    "negative rate": (["recipe.lr=-1"], ["recipe.lr=-1.0 must be positive"]),
    "too few classes": (["data.num_classes=5"], ["data.num_classes=5, but there are 10 digits"]),
    "backend": (["strategy=ddp", "strategy.backend=foo"], ["strategy.backend=foo is unknown; choose gloo, nccl"]),
    "no callback": (["callbacks.best._target_=builtins.dict"], ["builtins.dict builds a dict, expected a Callback"]),
    "nodes": (["strategy=ddp", "trainer.num_nodes=2"], ["nothing has started this run on other nodes"]),
    "no such class": (["recipe._target_=pl_pipe.Nothing"], ["Error locating target 'pl_pipe.Nothing'", "because: "]),
    "no recipe": (["recipe=null"], ["recipe=null chooses nothing; name an option, or leave recipe out"]),
    "no logger": (["logger=null"], ["logger=null chooses nothing; logger=none is the empty choice"]),
    "nothing to train": (["trainer.max_epochs=0"], ["nothing was trained: the run starts at step 0", "raise them"]),
    "broken yaml": (["--config-dir", "broken", "recipe=mine"], ["mine.yaml", "line 1"]),
    "impossible place": (["output_root=noise.ckpt/x"], ["Not a directory", "noise.ckpt"]),
    "run directory": (["some_dir"], ["fit takes overrides such as recipe=vgg16, got 'some_dir'"]),
}  # fmt: skip


@pytest.fixture
def scene(tmp_path: Path) -> set[str]:
    """The files and folders the cases speak of."""
    for folder in ("empty", "bare/train", "bare/val"):
        (tmp_path / folder).mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    (tmp_path / "noise.ckpt").write_bytes(bytes(torch.randint(256, (3000,), generator=generator).tolist()))
    torch.save({"weights": torch.zeros(3)}, tmp_path / "foreign.ckpt")
    (tmp_path / "broken" / "recipe").mkdir(parents=True)
    (tmp_path / "broken" / "recipe" / "mine.yaml").write_text("a: [1\nb: }")
    return {str(file) for file in tmp_path.rglob("*")}


@pytest.mark.parametrize("case", CASES)
def test_fit_refuses(case: str, inside: Inside, scene: set[str], tmp_path: Path) -> None:
    overrides, wanted = CASES[case]
    code, out, err = inside("fit", *overrides)
    said = out + err
    assert code == 1
    for words in wanted:
        assert words in said
    assert "Traceback" not in said
    assert {str(file) for file in tmp_path.rglob("*")} == scene, "something was left behind"


def test_a_directory_with_a_run_is_not_used_again(inside: Inside, copied: Path) -> None:
    run = only_run(copied)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    code, _, err = inside("fit", *TINY, f"hydra.run.dir={run}", "ckpt_path=last")
    assert code == 1
    assert f"hydra.run.dir={run} holds an earlier run; choose another directory (ckpt_path={run} goes on" in err
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_refused_run_keeps_the_users_own_directory(inside: Inside, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert inside("fit", "trainer.devices=9", f"hydra.run.dir={mine}")[0] == 1
    assert mine.is_dir()
    assert inside("fit", "trainer.devices=9", f"hydra.run.dir={tmp_path / 'new'}")[0] == 1
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_complete_says_so(inside: Inside, copied: Path) -> None:
    code, _, err = inside("fit", *TINY, f"ckpt_path={only_run(copied)}", cwd=copied)
    assert code == 1
    assert "nothing was trained: the run starts at step 12, and trainer.max_epochs=2" in err
    assert len(list((copied / "outputs" / "vgg16").iterdir())) == 1


def test_debug_shows_the_traceback(inside: Inside) -> None:
    from pl_pipe.errors import DataError

    with pytest.raises(DataError, match="reads files from disk"):
        raise_cause(inside, "fit", "--debug", "data=imagenet")


def raise_cause(inside: Inside, *arguments: str) -> None:
    try:
        inside(*arguments)
    except Exception as error:
        raise error.__cause__ or error from None


@pytest.mark.parametrize("command", ["validate", "test", "predict", "stop"])
def test_a_directory_that_is_no_run_is_refused(command: str, inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert "is not a directory; give a run's directory" in inside(command, "nowhere")[2]
    code, _, err = inside(command, "other")
    assert (code, "other is not a run's directory" in err) == (1, True)


def test_a_run_that_saved_nothing_cannot_be_validated(inside: Inside, copied: Path) -> None:
    run = only_run(copied)
    for file in (run / "checkpoints").iterdir():
        file.unlink()
    code, _, err = inside("validate", str(run))
    assert (code, "holds no checkpoint; the run ended before it saved one" in err) == (1, True)
    assert not list(run.glob("validate*"))


def test_another_models_checkpoint_is_refused(inside: Inside, trained: Path, tmp_path: Path) -> None:
    best = only_run(trained) / "checkpoints" / "best.ckpt"
    code, _, err = inside("fit", *TINY, "recipe.width=0.5", f"ckpt_path={best}")
    assert code == 1
    assert "best.ckpt belongs to another model" in err
    assert "of another shape (network.features.0.weight [8, 3, 3, 3] instead of [32, 3, 3, 3]" in err
    assert not list(tmp_path.iterdir())


def test_truncated_checkpoint_of_a_run(inside: Inside, copied: Path) -> None:
    last = only_run(copied) / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    code, _, err = inside("fit", *TINY, f"output_root={copied / 'outputs'}", "ckpt_path=last")
    assert (code, "cannot be read: it is truncated" in err) == (1, True)
    assert len(list((copied / "outputs" / "vgg16").iterdir())) == 1


def test_a_bad_job_of_a_sweep_does_not_stop_the_others(inside: Inside, tmp_path: Path) -> None:
    code, _, err = inside("fit", "-m", *TINY, "trainer.max_epochs=1", "recipe.optimizer=lion,sgd", "logger=none")
    assert code == 1
    assert "recipe.optimizer=lion is unknown" in err
    assert len(list(tmp_path.rglob("summary.json"))) == 1


@pytest.mark.parametrize("command", ["recipes", "strategies"])
def test_listing_with_a_missing_folder(command: str, inside: Inside) -> None:
    code, _, err = inside(command, "--config-dir", "nowhere")
    assert (code, "--config-dir nowhere is not a folder" in err) == (1, True)
