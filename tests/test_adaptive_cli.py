"""The command line's side of adaptive training: policies and monitors by name."""

import csv
from pathlib import Path

import pytest

from tests.conftest import TINY, Inside, only_run, run_cli


@pytest.mark.slow
def test_a_run_whose_batch_follows_the_noise(tmp_path: Path) -> None:
    settings = ["strategy=adaptive", "strategy.topology=ring", "policy=noise_batch", "callbacks=monitors"]
    grows = ["policy.noise_batch.every_steps=1", "callbacks.noise_scale.keep=0.5", "data.batch_size=2"]
    done = run_cli("fit", *TINY, *settings, *grows, "trainer.devices=2", "trainer.max_epochs=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "topology: ring" in done.stdout + done.stderr
    assert "batch size: 4 a rank" in done.stdout + done.stderr
    with (only_run(tmp_path) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert 10 < sum(bool(row["step_s"]) for row in rows) < 24, "48 samples twice, by four and then by more"
    assert any(row["noise_scale"] for row in rows)
    assert any(row["latency_0_1_ms"] for row in rows)


@pytest.mark.slow
def test_settings_of_the_measurement_that_contradict_each_other_are_refused(inside: Inside) -> None:
    code, _, err = inside("fit", *TINY, "policy=noise_batch", "callbacks=monitors", "policy.noise_batch.keep=0.5")
    assert code == 1
    assert "NoiseBatchPolicy has keep=0.5, and the GradientNoiseScale by which it decides has keep=0.95" in err


def test_workers_that_change_without_torchrun_are_refused(inside: Inside) -> None:
    code, _, err = inside("fit", *TINY, "policy=provision")
    assert code == 1
    assert "the number of workers can change under torchrun alone" in err


@pytest.mark.slow
def test_limits_that_contradict_each_other_are_refused(inside: Inside) -> None:
    code, _, err = inside(
        "fit", *TINY, "policy=noise_batch", "policy.noise_batch.least=64", "policy.noise_batch.most=2"
    )
    assert code == 1
    assert "least=64 and most=2 contradict each other" in err


@pytest.mark.slow
def test_an_unknown_setting_of_a_policy_is_refused(inside: Inside) -> None:
    code, _, err = inside("fit", *TINY, "policy=interference", "+policy.interference.windows=3")
    assert code == 1
    assert "InterferencePolicy has no setting windows=3; its rule has window, warmup" in err
