"""cuDNN's choices are timed while variants train on a GPU, and never where results must be reproducible."""

import pytest
import torch

from pl_pipe.strategies.fusion.tuning import AUTOTUNED, tuned_convolutions

CUDNN = torch.backends.cudnn


@pytest.fixture(autouse=True)
def settings() -> None:
    """As torch has them at first."""
    assert not CUDNN.benchmark
    assert not CUDNN.deterministic


def test_algorithms_are_timed_within_the_run_alone() -> None:
    limit = CUDNN.benchmark_limit
    with tuned_convolutions(torch.device("cuda", 0)):
        assert CUDNN.benchmark
        assert CUDNN.benchmark_limit == AUTOTUNED
    assert not CUDNN.benchmark
    assert CUDNN.benchmark_limit == limit


def test_nothing_is_timed_elsewhere() -> None:
    with tuned_convolutions(torch.device("cpu")):
        assert not CUDNN.benchmark


def test_nothing_is_timed_where_results_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with tuned_convolutions(torch.device("cuda", 0)):
        assert not CUDNN.benchmark
