"""Ranks that see different things, by their data, their metrics or their clocks, still train the same variants."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pl_pipe.strategies import FusionStrategy
from pl_pipe.strategies.fusion import formulation_trial
from pl_pipe.strategies.fusion.formulation_trial import _NAMES, FormulationTrial
from pl_pipe.strategies.fusion.launcher import FusionLauncher
from pl_pipe.strategies.fusion.step_formulation import TRAINING, StepCall
from pl_pipe.strategies.pipeline.launcher import end_at_exit
from tests.conftest import TIMEOUT_S, child_environment
from tests.fused_modules import Classifier, loader, trainer

SCRIPT = Path(__file__).with_name("fused_rank_decisions.py")


class Way:
    """A formulation that takes as long as it is told, or fails."""

    def __init__(self, name: str, seconds: float, clock: Any, fails: Sequence[int] = ()) -> None:
        self.name, self._seconds, self._clock, self._fails = name, seconds, clock, fails
        self.device_s: float | None = None
        self.calls = 0

    def run(self, call: StepCall) -> list[Any]:
        self.calls += 1
        self._clock.s += self._seconds
        if self.calls in self._fails:
            raise ValueError("cannot")
        return [self.name]

    def keep(self, places: Sequence[int]) -> None: ...

    def release(self) -> None: ...

    def described(self) -> list[str]:
        return []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(s=0.0)
    monkeypatch.setattr(formulation_trial, "time", SimpleNamespace(perf_counter=lambda: found.s))
    return found


def computed(ways: Sequence[Way], steps: int, **options: Any) -> list[str]:
    """How each of the steps was computed."""
    trial = FormulationTrial(ways, what="steps", width=2, device=torch.device("cpu"), **options)
    return [trial.run(StepCall(TRAINING, (), {}, nullcontext))[0] for _ in range(steps)]


def largest_with(seconds: Sequence[float], failing: str = "") -> Any:
    """Another rank, whose steps take this long, and where one way fails in the first."""
    left, asked = iter(seconds), []

    def largest(numbers: Sequence[float]) -> list[float]:
        asked.append(numbers)
        own = [0.0] * len(numbers)
        if failing and len(asked) == 1:
            own[1 + _NAMES.index(failing)] = 1.0
        own[0] = next(left)
        return [max(pair) for pair in zip(numbers, own, strict=True)]

    return largest, asked


def test_the_slowest_rank_chooses(clock: Any) -> None:
    largest, asked = largest_with([3.0] * 4 + [0.5] * 4)
    found = computed([Way("array", 0.1, clock), Way("one by one", 1.0, clock)], 12, largest=largest)
    assert found == ["array"] * 4 + ["one by one"] * 8
    assert len(asked) == 8  # and no more, once it is chosen


@pytest.mark.parametrize(
    ("python_s", "device_s", "chosen"), [(0.3, 0.9, "branches"), (0.3, 1.1, "array"), (1.1, 0.3, "array")]
)
def test_a_replay_counts_as_its_python_or_the_devices_time(
    clock: Any, python_s: float, device_s: float, chosen: str
) -> None:
    """Not as both, since they overlap when steps are not waited for."""
    branches = Way("branches", python_s, clock)
    branches.device_s = device_s
    assert computed([Way("array", 1.0, clock), branches], 12)[-1] == chosen


def test_what_fails_elsewhere_is_left_here_too(clock: Any) -> None:
    largest, asked = largest_with([9.0] * 9, failing="array")
    ways = [Way("array", 0.1, clock), Way("one by one", 1.0, clock)]
    found = computed(ways, 12, largest=largest, instead={"array": Way("model array", 0.2, clock)})
    assert found == ["array"] + ["model array"] * 4 + ["one by one"] * 4 + ["model array"] * 3
    assert len(asked) == 9


def test_a_later_failure_is_one_ranks_own(clock: Any) -> None:
    """The others would not know to answer."""
    largest, asked = largest_with([0.0] * 8)
    ways = [Way("array", 0.1, clock, fails=[6]), Way("one by one", 1.0, clock)]
    found = computed(ways, 12, largest=largest, instead={"array": Way("model array", 0.2, clock)})
    assert found == ["array"] * 4 + ["one by one"] * 4 + ["array"] + ["model array"] * 3
    assert len(asked) == 8


def test_evaluations_over_ranks_take_the_first_possible_way(clock: Any) -> None:
    ways = [Way("array", 1.0, clock, fails=[3]), Way("one by one", 0.1, clock)]
    assert computed(ways, 12, is_timed=False) == ["array"] * 2 + ["one by one"] * 10


@pytest.mark.parametrize("formulation", ["array", "model array", "one by one"])
def test_a_variant_logs_all_before_the_next_does(formulation: str) -> None:
    """However the step is computed: numbers that ranks average at once meet in this order."""
    said: list[str] = []

    class Heard(Classifier):
        def log(self, name: str, *args: Any, **kwargs: Any) -> None:
            said.append(name)
            super().log(name, *args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("early", self(batch[0]).sum())
            return super().training_step(batch, batch_idx)

    strategy = FusionStrategy([{"lr": 0.1}, {"lr": 0.2}], formulation=formulation)
    trainer(strategy=strategy, max_steps=1).fit(Heard(), loader())
    names = ["early", "train_loss", "train_acc"]
    assert said[:6] == [f"{name}/variant_{number}" for number in (0, 1) for name in names]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has kept of every scene of the script."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def same_weights(ranks: list[dict[str, Any]], scene: str) -> bool:
    first, second = (rank[scene]["weights"] for rank in ranks)
    return all(
        torch.equal(value, theirs[name])
        for own, theirs in zip(first, second, strict=True)
        for name, value in own.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "steps"), [("halving", {3: 9, 2: 6, 1: 3, 0: 3}), ("stopping", {0: 9, 1: 9})])
def test_variants_leave_by_rank_0s_metrics(ranks: list[dict[str, Any]], scene: str, steps: dict[int, int]) -> None:
    assert [rank[scene]["steps"] for rank in ranks] == [steps, steps]
    assert same_weights(ranks, scene)


@pytest.mark.slow
def test_ranks_may_predict_different_numbers_of_batches(ranks: list[dict[str, Any]]) -> None:
    assert [rank["predicting"]["batches"] for rank in ranks] == [3, 2]
    for own, theirs in zip(*(rank["predicting"]["buffers"] for rank in ranks), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "chosen"), [("clocks", "one by one"), ("failures", "model array")])
def test_ranks_compute_in_one_way(ranks: list[dict[str, Any]], scene: str, chosen: str) -> None:
    """By the time of the slowest, and where one cannot, none does."""
    assert [rank[scene]["chosen"] for rank in ranks] == [{"training_step": chosen, "validation_step": "array"}] * 2
    assert same_weights(ranks, scene)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["clocks", "failures"])
def test_numbers_are_averaged_with_those_of_their_name(ranks: list[dict[str, Any]], scene: str) -> None:
    names = {"first_step": 1.0, "second_step": 10.0, "third_step": 100.0, "val_first": 1.0, "val_second": 10.0}
    for rank in ranks:
        for number in (0, 1):
            assert {name: rank[scene]["metrics"][f"{name}/variant_{number}"] for name in names} == names


@pytest.mark.slow
def test_ranks_make_the_same_arrays_whatever_memory_is_free(ranks: list[dict[str, Any]]) -> None:
    assert [len(rank["memories"]["steps"]) for rank in ranks] == [4, 4]
    assert same_weights(ranks, "memories")


@pytest.mark.slow
def test_devices_of_different_size_are_refused(ranks: list[dict[str, Any]]) -> None:
    words = "rank 1 would train the variants [0, 1], and rank 0 [0, 1, 2, 3]: their devices have different memory"
    assert all(rank["devices"]["error"] == f"{words}; set max_array=2" for rank in ranks)


def test_no_child_stays_when_rank_0_fails_before_it_has_met_the_others() -> None:
    """They would wait for it: in a rendezvous, for as long as its store's address answers."""
    children = mock.Mock()
    children.launch.side_effect = OSError("the port is taken")
    children.procs = [mock.Mock()]
    launcher = FusionLauncher(FusionStrategy([{"lr": 0.1}]), children)
    with mock.patch("atexit.register") as register, pytest.raises(OSError, match="the port is taken"):
        launcher.launch(lambda: None)
    assert register.call_args_list == [mock.call(end_at_exit, children.procs)]
