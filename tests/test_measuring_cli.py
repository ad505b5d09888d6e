"""The commands that measure, and the whole way from a recipe to a simulated pipeline."""

import json
from pathlib import Path

import pytest

from pl_pipe.cluster import read_cluster
from pl_pipe.graph import parse_graph, read_profile
from pl_pipe.partition import read_plan
from tests.conftest import TINY, Inside, only_run, run_cli

QUICK = ("profiling.repeats=3", "profiling.warmup=1", "profiling.load_batches=2")


@pytest.fixture(scope="session")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profiled")
    done = run_cli("profile", *TINY, *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "its layers add up to" in done.stdout
    return folder


def test_profile_writes_what_it_promises(profiled: Path) -> None:
    run = only_run(profiled)
    profile = read_profile(run / "profile.json")
    assert (profile.model, profile.dtype, profile.repeats) == ("ImageClassifier", "float32", 3)
    assert profile.device.startswith("cpu (")
    assert profile.batch[0].startswith("float32[8, 3, 32, 32]")
    assert profile.data_load_s is not None
    assert profile.data_load_s > 0
    modules = [node.module for node in profile.graph.nodes if node.module]
    assert [name for name in modules if name.startswith("network.features")] == [
        f"network.features.{i}" for i in range(31)
    ]
    text, _ = parse_graph((run / "graph.txt").read_text())
    assert [node.name for node in text.nodes] == [node.name for node in profile.graph.nodes]
    assert (run / "profile.png").stat().st_size > 10_000
    assert not (run / "checkpoints").exists()


def test_from_a_recipe_to_a_simulated_pipeline(profiled: Path, inside: Inside, tmp_path: Path) -> None:
    profile = only_run(profiled) / "profile.json"
    code, _, err = inside("plan", f"profile={profile}", "cluster.devices=4", "plan.out=plan.json")
    assert (code, err) == (0, "")
    plan = read_plan(tmp_path / "plan.json")
    plan.check_fits(read_profile(profile).graph)
    code, out, err = inside("simulate", "plan.path=plan.json", f"profile={profile}", "schedule=pipedream")
    assert (code, err) == (0, "")
    assert "bubbles" in out


def test_profile_refuses_what_it_cannot_measure(inside: Inside, tmp_path: Path) -> None:
    code, _, err = inside("profile", *TINY, "trainer.precision=64-true")
    assert code == 1
    assert "trainer.precision=64-true cannot be profiled; choose one of 32-true" in err
    code, _, err = inside("profile", *TINY, "profiling.repeats=0")
    assert code == 1
    assert "profiling.repeats=0" in err
    assert not list(tmp_path.rglob("profile.json"))


def test_a_step_that_reads_values_is_told(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from pl_pipe.recipes.vision.classifier import ImageClassifier\n"
        "class Reading(ImageClassifier):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        loss = super().training_step(batch, batch_idx)\n"
        "        if loss.item() > 1e9:\n"
        "            raise ValueError\n"
        "        return loss\n"
    )
    code, out, err = inside("profile", *TINY, *QUICK, "recipe._target_=mine.Reading")
    assert (code, err) == (0, "")
    assert "mine.py:6 reads the value of a tensor" in out
    (read,) = read_profile(only_run(tmp_path) / "profile.json").graph.reads
    assert read.line == "mine.py:6"


@pytest.mark.slow
def test_probe_writes_a_cluster_that_plan_reads(profiled: Path, inside: Inside, tmp_path: Path) -> None:
    done = run_cli("probe", "trainer.devices=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cluster = read_cluster(tmp_path / "cluster.json")
    assert (cluster.workers, len(cluster.levels)) == (2, 1)
    pair = json.loads((tmp_path / "cluster.json").read_text())["pairs"][0]
    assert {"4096", str(2**20)} <= set(pair["seconds"])  # larger ones too, where the machine is not busy
    code, _, err = inside(
        "plan", f"profile={only_run(profiled) / 'profile.json'}", "cluster=file", "plan.out=plan.json"
    )
    assert (code, err) == (0, "")
    assert read_plan(tmp_path / "plan.json").cluster == cluster


def test_probe_needs_two_ranks(inside: Inside, tmp_path: Path) -> None:
    code, _, err = inside("probe")
    assert code == 1
    assert "trainer.devices=2" in err
    assert not (tmp_path / "cluster.json").exists()
