"""The command line: what a run leaves behind, what later commands make of it, and how it goes on."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from omegaconf import OmegaConf

from tests.conftest import ROOT, TIMEOUT_S, TINY, Inside, marked_processes, only_run, run_cli


def test_a_run_leaves_its_record(trained: Path) -> None:
    run = only_run(trained)
    files = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    record = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}
    assert files == record | {
        "checkpoints/best.ckpt", "checkpoints/last.ckpt", "fit.log", "hparams.yaml", "metrics.csv", "summary.json",
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["recipe"], summary["data"], summary["strategy"]) == (
        "finished", "vgg16", "synthetic", "single",
    )  # fmt: skip
    assert (summary["epochs"], summary["steps"], summary["samples"]) == (2, 12, 96)
    assert summary["wall_s"] > summary["train_s"] > 0
    assert summary["samples_per_s"] == pytest.approx(96 / summary["train_s"])
    assert summary["versions"]["torch"] == torch.__version__.split("+")[0]
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    accuracies = [float(row["val_acc"]) for row in rows if row["val_acc"]]
    assert len(accuracies) == 2
    assert summary["best"]["value"] == pytest.approx(max(accuracies))
    assert summary["last"]["val_acc"] == pytest.approx(accuracies[-1])
    assert OmegaConf.load(run / ".hydra" / "config.yaml").recipe.width == 0.01


def test_validate_test_and_predict_read_the_runs_config(inside: Inside, copied: Path) -> None:
    run = only_run(copied)
    best = json.loads((run / "summary.json").read_text())["best"]
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    # What is given now wins over what the run recorded: here the batch size, which changes no metric.
    again = ["data=synthetic", "data.batch_size=5"]
    for arguments in (["validate", run], ["test", run, *again], ["predict", run, "predict.format=csv"]):
        code, _, err = inside(*map(str, arguments), cwd=copied)
        assert code == 0, err
    result = json.loads((run / "validate.json").read_text())
    assert result["ckpt_path"].endswith("best.ckpt")
    assert result["metrics"][0]["val_acc"] == pytest.approx(best["metrics"]["val_acc"])
    assert result["metrics"][0]["val_loss"] == pytest.approx(best["metrics"]["val_loss"], abs=1e-6)
    assert json.loads((run / "test.json").read_text())["metrics"][0]["test_acc"] >= 0
    rows = list(csv.DictReader((run / "predictions.csv").open()))
    assert [int(row["index"]) for row in rows] == list(range(20))
    assert list((copied / "outputs" / "vgg16").iterdir()) == [run], "another run directory was made"
    assert {file: file.read_bytes() for file in before} == before, "the run's own files were changed"


def test_a_run_whose_defaults_have_changed_since_says_so(inside: Inside, copied: Path) -> None:
    record = only_run(copied) / ".hydra" / "config.yaml"
    config = OmegaConf.load(record)
    config.data.seed, config.recipe.lr = 7, 0.5
    OmegaConf.save(config, record)
    code, out, err = inside("validate", str(only_run(copied)), "recipe.lr=0.3", cwd=copied)
    assert code == 0, err
    assert "data.seed was 7 in the run and is 0 now" in out + err
    assert "recipe.lr was" not in out + err, "given on the command line, so no surprise"


@pytest.mark.slow
def test_prediction_on_two_ranks_is_that_of_one(copied: Path) -> None:
    run = only_run(copied)
    outputs = []
    for extra in ([], ["strategy=ddp", "trainer.devices=2"]):
        done = run_cli("predict", str(run), *extra, cwd=copied)
        assert done.returncode == 0, done.stderr
        outputs.append(torch.load(run / "predictions.pt", weights_only=True))
    one, two = outputs
    assert torch.equal(one["index"], two["index"])
    torch.testing.assert_close(one["outputs"], two["outputs"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_checkpoint_of_one_strategy_validates_under_another(trained: Path, tmp_path: Path) -> None:
    best = only_run(trained) / "checkpoints" / "best.ckpt"
    expected = json.loads((only_run(trained) / "summary.json").read_text())["best"]["metrics"]
    # 20 samples on 2 ranks divide evenly, so nothing is counted twice.
    done = run_cli("validate", *TINY, "strategy=ddp", "trainer.devices=2", f"ckpt_path={best}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((only_run(tmp_path) / "validate.json").read_text())["metrics"][0]
    assert metrics["val_acc"] == pytest.approx(expected["val_acc"])


def test_last_goes_on_and_equals_the_uninterrupted_run(inside: Inside, tmp_path: Path) -> None:
    """Two epochs, then two more from `last`, are the four epochs of one run, bit for bit (no shuffling, no dropout)."""
    settings = [*TINY[:-1], "recipe.lr_policy=constant", "recipe.dropout=0", "trainer.overfit_batches=6"]
    split, whole = tmp_path / "split", tmp_path / "whole"
    for folder in (split, whole):
        folder.mkdir()
    assert inside("fit", *settings, "trainer.max_epochs=4", cwd=whole)[0] == 0
    assert inside("fit", *settings, "trainer.max_epochs=2", cwd=split)[0] == 0
    first = only_run(split)
    code, out, err = inside("fit", *settings, "trainer.max_epochs=4", "ckpt_path=last", cwd=split)
    assert code == 0, err
    assert f"going on from step 12 (epoch 1) of {first / 'checkpoints' / 'last.ckpt'}" in out + err
    (second,) = set((split / "outputs" / "vgg16").iterdir()) - {first}
    ends = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True) for run in (second, only_run(whole))]
    assert [end["global_step"] for end in ends] == [24, 24]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(ends[0][part], ends[1][part], rtol=0, atol=0)
    assert json.loads((second / "summary.json").read_text())["samples"] == 96, "a resumed run counts its own part"


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_saved_step(tmp_path: Path) -> None:
    slow = ["trainer.max_epochs=2000", "callbacks.last.every_n_steps=4", *TINY[:-1]]
    mark = os.urandom(8).hex()
    environment = dict(os.environ) | {"PL_PIPE_TEST_MARK": mark}
    command = [Path(sys.executable).parent / "pl-pipe", "fit", *slow]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        deadline = time.monotonic() + TIMEOUT_S
        while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(run.pid, signal.SIGKILL)
    assert not marked_processes(mark)
    (saved,) = tmp_path.rglob("last.ckpt")
    step = torch.load(saved, weights_only=True)["global_step"]
    assert step > 0
    done = run_cli("fit", *slow, "ckpt_path=last", f"trainer.max_epochs={step // 6 + 2}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on from step {step} " in done.stdout + done.stderr


@pytest.mark.slow
def test_stop_ends_all_ranks(tmp_path: Path) -> None:
    mark = os.urandom(8).hex()
    environment = dict(os.environ) | {"PL_PIPE_TEST_MARK": mark}
    long = [*TINY[:-1], "trainer.max_epochs=100000", "strategy=ddp", "trainer.devices=2"]
    command = [Path(sys.executable).parent / "pl-pipe", "fit", *long]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not list(tmp_path.rglob("last.ckpt")):
                assert time.monotonic() < deadline, "training did not start"
                time.sleep(0.2)
            folder = only_run(tmp_path)
            assert len(list((folder / "processes").iterdir())) == 2
            done = run_cli("stop", str(folder), cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert "stopped 2 process(es)" in done.stdout
            run.wait(timeout=TIMEOUT_S)
            assert not marked_processes(mark)
        finally:
            for process in marked_processes(mark):
                process.kill()
    again = run_cli("stop", str(folder), cwd=tmp_path)
    assert (again.returncode, "nothing to stop" in again.stdout) == (0, True)


def test_stop_leaves_a_stranger_with_a_recycled_id_alone(copied: Path) -> None:
    run = only_run(copied)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        try:
            started = psutil.Process(stranger.pid).create_time() - 100
            host = os.uname().nodename
            note = {"pid": stranger.pid, "started": started, "host": host, "rank": "0"}
            (run / "processes").mkdir()
            (run / "processes" / f"{host}_{stranger.pid}.json").write_text(json.dumps(note))
            done = run_cli("stop", str(run), cwd=copied)
            assert "nothing to stop" in done.stdout
            assert stranger.poll() is None
        finally:
            stranger.kill()


@pytest.mark.slow
def test_a_sweep_runs_each_job_on_two_devices(tmp_path: Path) -> None:
    sweep = ["-m", "recipe=vgg16,mobilenet_v3", "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1"]
    done = run_cli(
        "fit",
        *sweep,
        "data=synthetic",
        "data.num_samples=16",
        "data.num_val_samples=16",
        "recipe.width=0.1",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (root,) = (tmp_path / "outputs" / "multirun").iterdir()
    summaries = {
        folder.name: json.loads((folder / "summary.json").read_text()) for folder in root.iterdir() if folder.is_dir()
    }
    assert set(summaries) == {"0_vgg16", "1_mobilenet_v3"}
    for summary in summaries.values():
        assert (summary["status"], summary["samples"], summary["hardware"]["devices"]) == ("finished", 16, 2)
    assert not (tmp_path / "outputs" / "vgg16").exists(), "a child made a directory of its own"


@pytest.mark.slow
def test_torchrun_decides_devices_and_all_ranks_share_a_directory(tmp_path: Path) -> None:
    launcher = (str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2")
    done = run_cli("fit", *TINY, "strategy=ddp", cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["hardware"]["devices"], summary["samples"], summary["steps"]) == (2, 96, 6)
    assert {"fit.log", "fit_rank1.log"} <= {file.name for file in run.iterdir()}
    refused = run_cli("fit", *TINY, "strategy=ddp", "trainer.devices=4", cwd=tmp_path, launcher=launcher)
    assert refused.returncode != 0
    assert "torchrun started 2 process(es) on each of 1 node(s); leave both settings out" in refused.stderr
    assert only_run(tmp_path) == run, "a refused run left a directory"


@pytest.mark.slow
def test_ddp_on_two_ranks_is_the_single_run(tmp_path: Path) -> None:
    """Without shuffling and with the same global batch, two ranks of 4 train as one of 8.

    The `last` callback stands alone: it must not meet rank 0's progress bar in the order of collectives.
    """
    last = "+callbacks.last={_target_: pl_pipe.callbacks.last_checkpoint.LastCheckpoint, dirpath: ckpt}"
    settings = [*TINY, "recipe.dropout=0", "trainer.overfit_batches=6", "callbacks=none", last]
    ends = []
    for name, extra in (("one", []), ("two", ["data.batch_size=4", "strategy=ddp", "trainer.devices=2"])):
        (tmp_path / name).mkdir()
        done = run_cli("fit", *settings, *extra, cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        ends.append(torch.load(tmp_path / name / "ckpt" / "last.ckpt", weights_only=True))
    assert [end["global_step"] for end in ends] == [12, 12]
    weights = [{n: v for n, v in end["state_dict"].items() if n.startswith("network")} for end in ends]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("command", [["recipes"], ["strategies"], ["version"], ["--help"]])
def test_listings(inside: Inside, command: list[str]) -> None:
    code, out, err = inside(*command)
    assert (code, err) == (0, "")
    wanted = {
        "recipes": ["vgg16", "resnet56", "digits", "imagenet", "pl-pipe fit recipe="],
        "strategies": ["single", "ddp", "fsdp", "pl-pipe fit recipe=vgg16 strategy=ddp trainer.devices=4"],
        "version": ["pl-pipe 0.", "torch 2.", "lightning 2."],
        "--help": ["fit", "validate", "predict", "stop", "recipes"],
    }[command[0]]
    assert all(word in out for word in wanted)


def test_hydra_flags_pass_through(inside: Inside, tmp_path: Path) -> None:
    code, out, _ = inside("fit", "--cfg", "job", "recipe=resnet18", "recipe.lr=0.5")
    assert code == 0
    assert OmegaConf.create(out).recipe.lr == 0.5
    code, out, _ = inside("fit", "--help")
    assert code == 0
    assert "--config-dir adds your own" in re.sub(r"\s+", " ", out)
    assert not list(tmp_path.iterdir())


def test_cli_py_and_module_are_the_same_command(tmp_path: Path) -> None:
    for command in ([str(ROOT / "cli.py")], ["-m", "pl_pipe"]):
        done = subprocess.run(
            [sys.executable, *command, "version"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        assert done.stdout.startswith("pl-pipe 0.")
