"""cuDNN's choices are timed while variants train on a GPU, and never where results must be reproducible."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pl_pipe.strategies.fusion import choosing_threads
from pl_pipe.strategies.fusion.choosing_threads import quickest_thread
from pl_pipe.strategies.fusion.tuning import AUTOTUNED, is_timing_convolutions, tuned_convolutions

CUDNN = torch.backends.cudnn
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def settings() -> None:
    """As torch has them at first."""
    assert not CUDNN.benchmark
    assert not CUDNN.deterministic


def test_algorithms_are_timed_within_the_run_alone() -> None:
    limit = CUDNN.benchmark_limit
    assert not is_timing_convolutions(GPU)
    with tuned_convolutions(GPU):
        assert CUDNN.benchmark
        assert is_timing_convolutions(GPU)
        assert not is_timing_convolutions(torch.device("cpu"))
        assert CUDNN.benchmark_limit == AUTOTUNED
    assert not CUDNN.benchmark
    assert CUDNN.benchmark_limit == limit


def test_nothing_is_timed_elsewhere() -> None:
    with tuned_convolutions(torch.device("cpu")):
        assert not CUDNN.benchmark


def test_nothing_is_timed_where_results_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with tuned_convolutions(GPU):
        assert not CUDNN.benchmark


def test_nothing_is_chosen_where_results_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    with tuned_convolutions(GPU):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not is_timing_convolutions(GPU)


class _Replays:
    """A capture that takes as long as it is told."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def replay(self) -> None: ...

    def device_s(self) -> float:
        return self._seconds


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's calls to one do nothing."""
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("seconds", "quickest"), [([3, 5, 2, 9, 4], 2), ([1, 5, 2, 9, 4], 0), ([3, 5, None, 2, 4], 3)])
def test_the_thread_with_the_quickest_choices_is_kept(seconds: list[Any], quickest: int) -> None:
    """Which has no memory to choose in (None) does not matter; the first is the one that asks."""
    threads: list[threading.Thread] = []
    undone: list[int] = []

    def made() -> Any:
        threads.append(threading.current_thread())
        found = seconds[len(threads) - 1] if len(threads) <= len(seconds) else 0
        if found is None:
            raise torch.OutOfMemoryError
        return _Replays(found)

    kept = quickest_thread(made, GPU, undo=lambda: undone.append(0))
    assert len(set(threads)) == len(seconds)
    assert len(undone) == len([one for one in seconds if one is not None])
    for place, thread in enumerate(threads[1:], start=1):
        if place != quickest:
            thread.join(timeout=10)
            assert not thread.is_alive()  # nobody needs it any more
    if kept is None:
        assert quickest == 0
        return
    kept.run(made)
    assert threads[-1] is threads[quickest]


@pytest.mark.usefixtures("no_gpu")
def test_choosing_ends_when_it_has_taken_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing_threads, "_ENOUGH_S", 0.0)
    made_in: list[threading.Thread] = []

    def made() -> Any:
        made_in.append(threading.current_thread())
        return _Replays(1.0)

    assert quickest_thread(made, GPU, undo=lambda: None) is None
    assert made_in == [threading.current_thread()]


@pytest.mark.usefixtures("no_gpu")
def test_what_the_caller_itself_cannot_capture_is_an_error() -> None:
    def made() -> Any:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        quickest_thread(made, GPU, undo=lambda: None)
