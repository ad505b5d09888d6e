"""Delay models: by seed and rank, and what they make of a batch."""

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipedream_farm import Farm, Order
from pipedream_tasks import SPLITS

from pl_pipe.callbacks import hetero
from pl_pipe.errors import ConfigError
from pl_pipe.hetero import LateAtRandom, SlowPeriods, SlowWorker, Trace

pytest_plugins = "pipedream_plugin"


def drawn(model: Any, steps: int = 400, compute_s: float = 1.0) -> list[float]:
    return [model.delay_s(phase, compute_s) for _ in range(steps) for phase in ("forward", "backward")]


def test_late_at_random_is_the_artifacts_chance() -> None:
    delays = drawn(LateAtRandom(rank=1, seed=3, delay_s=0.2), steps=5000)
    assert set(delays) == {0.0, 0.2}
    assert 0.09 < sum(delays) / 0.2 / len(delays) < 0.11
    assert delays == drawn(LateAtRandom(rank=1, seed=3, delay_s=0.2), steps=5000)
    for other in (LateAtRandom(rank=2, seed=3, delay_s=0.2), LateAtRandom(rank=1, seed=4, delay_s=0.2)):
        assert delays != drawn(other, steps=5000)


def test_a_slow_worker_takes_its_factor() -> None:
    slow, usual = SlowWorker(rank=1, ranks=[1], factor=4.0), SlowWorker(rank=0, ranks=[1], factor=4.0)
    assert drawn(slow, steps=2, compute_s=0.5) == [0.0, 1.5, 0.0, 1.5]
    assert not any(drawn(usual))


def test_slow_periods_come_and_go() -> None:
    delays = drawn(SlowPeriods(rank=0, seed=1, factor=3.0, slow_steps=10, usual_steps=30), steps=8000)[1::2]
    assert set(delays) == {0.0, 2.0}
    assert 0.2 < sum(delay > 0 for delay in delays) / len(delays) < 0.3
    changes = sum(one != other for one, other in pairwise(delays))
    assert 300 < changes < 500
    assert delays != drawn(SlowPeriods(rank=1, seed=1, factor=3.0, slow_steps=10, usual_steps=30), steps=8000)[1::2]


def test_a_trace_is_read_and_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("rank,step,forward_s,backward_s\n1,1,0.3,0.4\n0,0,9,9\n1,0,0.1,0.2\n")
    assert drawn(Trace(rank=1, path=str(path)), steps=3) == [0.1, 0.2, 0.3, 0.4, 0.1, 0.2]
    assert not any(drawn(Trace(rank=2, path=str(path))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hetero.artifact(seed=1, delay_s=-1, probability=0.1), "hetero.delay_s=-1"),
        (lambda: hetero.artifact(seed=1, delay_s=1, probability=2), "hetero.probability=2; give a number from 0 to 1"),
        (lambda: hetero.slow_worker(ranks=[1], factor=0.5, step_s=None), "hetero.factor=0.5"),
        (lambda: hetero.slow_worker(ranks=1, factor=2, step_s=None), "hetero.ranks=1"),  # type: ignore[arg-type]
        (lambda: hetero.artifact(seed=1, delay_s=float("inf"), probability=0.1), "hetero.delay_s=inf"),
        (lambda: hetero.trace(path=None), "give hetero.path=FILE.csv"),
        (lambda: hetero.trace(path="absent.csv"), "hetero.path=absent.csv cannot be read"),
        (lambda: hetero.random_periods(seed=0, factor=2, slow_steps=0, usual_steps=1, step_s=None), "slow_steps=0"),
    ],
)
def test_delays_that_mean_nothing_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("delay", ["-1", "nan", "inf"])
def test_a_trace_with_delays_that_cannot_be_is_refused(tmp_path: Path, delay: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"rank,step,forward_s,backward_s\n0,0,0.1,{delay}\n")
    with pytest.raises(ConfigError, match=f"has a delay of {delay} s for rank 0; give seconds"):
        Trace(rank=0, path=str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [("0,0,0.1,0.1\n1,0,0.1\n", "line 3 has no backward_s"), ("0,0,soon,0.1\n", "could not convert string to float")],
)
def test_a_trace_that_was_cut_off_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"rank,step,forward_s,backward_s\n{text}")
    with pytest.raises(ConfigError, match=rf"cannot be read \(ValueError: {words}"):
        Trace(rank=0, path=str(path))


class Trainer:
    global_rank = 0
    strategy = None
    num_nodes, num_devices = 1, 2


def test_a_trace_of_ranks_that_are_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("rank,step,forward_s,backward_s\n0,0,1,1\n5,0,1,1\n")
    callback: Any = hetero.trace(path=str(path))
    with pytest.raises(ConfigError, match="no rank 5 among 2"):
        callback.setup(Trainer(), None, "fit")
    path.write_text("rank,step,forward_s,backward_s\n")
    with pytest.raises(ConfigError, match="has no delays below its header"):
        hetero.trace(path=str(path))


def test_a_slow_worker_that_is_not_there_is_refused() -> None:
    callback: Any = hetero.slow_worker(ranks=[1, 7], factor=3.0, step_s=None)
    with pytest.raises(ConfigError, match=r"no rank 7 among 2; give numbers up to 1, or set trainer.devices=8"):
        callback.setup(Trainer(), None, "fit")


def test_the_callback_sleeps_as_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(time, "sleep", sleep)
    callback: Any = hetero.slow_worker(ranks=[0], factor=3.0, step_s=None)

    callback.setup(Trainer(), None, "fit")
    for _ in range(3):
        callback.on_train_batch_start(Trainer(), None, None, 0)
        now_s[0] += 0.1  # the forward
        callback.on_before_backward(None, None, None)
    assert slept == pytest.approx([0.6] * 3)  # twice three forwards
    assert callback.slept_s == pytest.approx(1.8)


def test_batches_of_other_replicas_are_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    callback: Any = hetero.slow_worker(ranks=[0], factor=3.0, step_s=0.3)
    for computes in (True, False, True):
        trainer = SimpleNamespace(
            num_nodes=1, num_devices=1, global_rank=0, strategy=SimpleNamespace(computes_next_batch=computes)
        )
        callback.setup(trainer, None, "fit")
        callback.on_train_batch_start(trainer, None, None, 0)
        callback.on_before_backward(trainer, None, None)
    assert len(slept) == 2


@pytest.mark.parametrize(
    "order",
    [Order("uneven_tasks.fit", ranks=3, strategy="pipedream", data={"samples": 24}, trainer={"max_epochs": 1},
           options={"split_points": SPLITS[2], "replicas": [2, 1]})],
)  # fmt: skip
def test_a_pipeline_says_whose_batch_it_is(farm: Farm, order: Order) -> None:
    last, first, second = (notes["computed"] for notes in farm.start(order).outcome)
    assert last == [True] * 6
    assert first == [True, False] * 3
    assert second == [False, True] * 3
