"""Policies: rules on numbers that are made up, then trainings in which batches and decisions are looked at."""

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from adaptive_tasks import Known, Large, Numbered, Small
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from pipedream_farm import Farm, Order
from torch.optim import lr_scheduler as schedules
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from pl_pipe.adapt.learning_rates import scale_rates
from pl_pipe.adapt.monitors import GradientNoiseScale, LinkThroughput
from pl_pipe.adapt.policies import InterferencePolicy, NoiseBatchPolicy, Policy, SwitchTopology
from pl_pipe.adapt.policies.base import PolicyError
from pl_pipe.adapt.policies.batch_size import BatchSizeRule
from pl_pipe.adapt.policies.interference import (
    Interference,
    InterferenceSettings,
    Reversal,
    throughputs,
)
from pl_pipe.adapt.policies.noise_batch import ResizeBatch
from pl_pipe.adapt.policies.race import Race
from pl_pipe.adapt.resizable_batches import ResizableBatches
from pl_pipe.comm.topology import AdaptableSums, topology_of
from pl_pipe.errors import ConfigError

pytest_plugins = "pipedream_plugin"

BATCHES = Order("adaptive_tasks.batches", ranks=2)
WITHIN = Order("adaptive_tasks.batches", ranks=2, every_steps=2)
BATCHES_ALONE = Order("adaptive_tasks.batches", ranks=1)
RAISES = Order("adaptive_tasks.policy", ranks=2, what="raise", on_error="stop")
GOES_ON = Order("adaptive_tasks.policy", ranks=2, what="raise", on_error="continue")
DIFFERS = Order("adaptive_tasks.policy", ranks=2, what="differ", on_error="stop")
ALONE = Order("adaptive_tasks.policy", ranks=2, what="alone", on_error="stop")
ALONE_GOES_ON = Order("adaptive_tasks.policy", ranks=2, what="alone", on_error="continue")
ALONE_AT_THE_END = Order("adaptive_tasks.policy", ranks=2, what="last", on_error="stop")
WRONG = Order("adaptive_tasks.policy", ranks=2, what="wrong", on_error="stop")
WRONG_GOES_ON = Order("adaptive_tasks.policy", ranks=2, what="wrong", on_error="continue")
HALF_MADE = Order("adaptive_tasks.policy", ranks=2, what="half", on_error="continue")
TEN_LINES = Order("adaptive_tasks.policy", ranks=2, what="ring", on_error="stop")
BESIDE = Order("adaptive_tasks.policy", ranks=2, what="ring", on_error="stop", probed=True)


# ---- interference


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_interference(kind: str, seed: int) -> None:
    """Two thousand steps with ±10 % noise on every rank."""
    draws = random.Random(seed)
    detector = Interference(4)
    for _ in range(2000):
        noise = [draws.uniform(0.9, 1.1) if kind == "uniform" else max(0.1, draws.gauss(1, 0.1)) for _ in range(8)]
        assert not detector.observe([100 * one for one in noise[:4]], [70 * one for one in noise[4:]])


@pytest.mark.parametrize(("slow", "alarms"), [(2, [False] * 4), (3, [False, True, True, True]), (4, [True] * 4)])
def test_all_ranks_are_heard_at_once_and_a_majority_the_second_time(slow: int, alarms: list[bool]) -> None:
    detector = Interference(4, InterferenceSettings(warmup=0, window=3, smooth=1))
    for _ in range(5):
        assert not detector.observe([100.0] * 4)
    assert [detector.observe([10.0] * slow + [100.0] * (4 - slow)) for _ in range(4)] == alarms


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_interference_is_noticed_within_five_steps(share: float) -> None:
    draws = random.Random(1)
    detector = Interference(4)
    for _ in range(100):
        assert not detector.observe([draws.uniform(90, 110) for _ in range(4)])
    alarms = [detector.observe([share * draws.uniform(90, 110) for _ in range(3)] + [100.0]) for _ in range(5)]
    assert any(alarms)
    assert detector.votes == (True, True, True, False)


def test_half_of_the_ranks_are_no_majority_and_a_moment_is_no_alarm() -> None:
    detector = Interference(4, InterferenceSettings(warmup=0, window=3, patience=3, smooth=1))
    for _ in range(5):
        assert not detector.observe([100.0] * 4)
    assert not any(detector.observe([10.0, 10.0, 100.0, 100.0]) for _ in range(20))
    detector.observe([100.0] * 4)
    assert not any(detector.observe([10.0] * 4) for _ in range(2))
    assert not detector.observe([100.0] * 4)
    assert not any(detector.observe([10.0] * 4) for _ in range(2))
    assert detector.observe([10.0] * 4)


def test_one_direction_is_enough_and_one_late_message_is_not() -> None:
    """Traffic to the centre of a star: what it receives is slow, and what the others send."""
    detector = Interference(3, InterferenceSettings(warmup=0, window=3))
    for _ in range(4):
        assert not detector.observe([90.0, 100.0, 100.0], [100.0, 100.0, 100.0])
    assert not detector.observe([9.0, 10.0, 10.0], [10.0, 10.0, 10.0])
    assert not any(detector.observe([90.0, 100.0, 100.0], [100.0, 100.0, 100.0]) for _ in range(3))
    alarms = [detector.observe([60.0, 100.0, 100.0], [100.0, 60.0, 100.0]) for _ in range(4)]
    assert alarms == [False, False, True, True]
    assert detector.votes == (True, True, False)


def test_a_vote_ends_above_where_it_began() -> None:
    detector = Interference(1, InterferenceSettings(warmup=0, window=3, threshold=0.7, recovered=0.9, smooth=1))
    seen = []
    for value in (100, 100, 100, 80, 60, 80, 95, 80):
        detector.observe([float(value)])
        seen.append(detector.votes[0])
    assert seen == [False, False, False, False, True, True, False, False]


def test_after_an_alarm_there_is_rest_and_after_a_switch_a_new_reference() -> None:
    settings = InterferenceSettings(warmup=1, window=2, patience=1, cooldown=5, smooth=1)
    detector = Interference(2, settings)
    for _ in range(4):
        detector.observe([100.0, 100.0])
    assert detector.observe([10.0, 10.0])
    detector.rest()
    assert [detector.observe([10.0, 10.0]) for _ in range(6)] == [False] * 4 + [True, True]
    detector.begin_anew()
    detector.rest()
    assert not any(detector.observe([10.0, 10.0]) for _ in range(50)), "ten is the new reference"


def test_what_was_not_measured_is_no_vote() -> None:
    detector = Interference(2, InterferenceSettings(warmup=0, window=2, patience=1))
    for _ in range(3):
        detector.observe([100.0, 100.0])
    assert not any(detector.observe([math.nan, 0.0]) for _ in range(5))


def test_throughputs_are_of_both_directions() -> None:
    links = [[(0.0, 0.0), (10.0, 1.0)], [(30.0, 1.0), (0.0, 0.0)]]
    assert throughputs(links) == ([10.0, 30.0], [30.0, 10.0])
    assert math.isnan(throughputs([[(0.0, 0.0)]])[0][0])


def test_the_shortest_steps_win_if_they_save_enough() -> None:
    race = Race(["ring", "clique"], before_s=1.0, must_save_s=0.2)
    assert race.runner == "ring"
    assert [race.observe(step_s) for step_s in (5.0, 0.7)] == [False, True], "the first step may be late"
    assert race.runner == "clique"
    assert [race.observe(step_s) for step_s in (0.5, 0.6)] == [False, True]
    assert (race.runner, race.steps_s, race.winner) == (None, {"ring": 0.7, "clique": 0.5}, "clique")
    assert Race(["ring"], 1.0, 0.2, {"ring": 0.9}).winner is None


def test_the_way_back_needs_two_quick_trials_in_a_row() -> None:
    reversal = Reversal(1.0, InterferenceSettings())
    assert [reversal.observe(first_s) for first_s in (2.0, 1.05, 3.0, 1.0, 1.0)] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"threshold": 0.9, "recovered": 0.8}, "threshold=0.9 and recovered=0.8 contradict each other"),
        ({"window": 0}, "window=0 is no number of steps"),
        ({"gain": 1.0}, "gain=1.0 below 1"),
        ({"treshold": 0.5}, "InterferencePolicy has no setting treshold=0.5; its rule has window, warmup"),
        ({"threshold": "abc"}, "threshold='abc' is no number"),
        ({"window": 2.5}, "window=2.5 is no whole number"),
        ({"warmup": float("nan")}, "warmup=nan is no whole number"),
        ({"probe_every": "x"}, "probe_every='x' is no whole number"),
        ({"probe_every": 0}, "probe_every=0 is no number of steps"),
        ({"on_error": "ignore"}, "on_error=ignore is unknown; choose stop or continue"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        InterferencePolicy(**settings)


class ScriptedSums(AdaptableSums):
    """Links and trials as a test wants them; rank 0's link is shared with other traffic in some steps."""

    def __init__(self, ranks: int, name: str) -> None:
        self.hosts = [f"host{rank}" for rank in range(ranks)]
        self.summing: Any = SimpleNamespace(topology=topology_of(name, self.hosts))
        self.busy, self.step_s = False, 0.0

    whole_trials_a_step = 1.0

    def slowest(self, seconds: float) -> float:
        return self.step_s or seconds

    def trial(self, topologies: Any, *, turns: int = 3, whole: bool = False, **_: Any) -> dict[str, float]:
        """The busiest link decides: messages over it, of rank 0 half as fast while others use it."""
        found = {}
        for topology in topologies:
            loads = [0.0] * topology.ranks
            for tree in topology.trees:
                for rank, father in enumerate(tree.up):
                    if rank != father:
                        loads[rank] += 1 / len(topology.trees)
                        loads[father] += 1 / len(topology.trees)
            if topology.is_native:
                loads = [1.6] * topology.ranks
            loads[0] *= 3 if self.busy else 1
            found[topology.name] = max(loads)
        return found


def begun(policy: InterferencePolicy, sums: ScriptedSums) -> Any:
    """As at the start of a training."""
    policy._monitor = SimpleNamespace(links=[], measured_step=math.inf)  # type: ignore[assignment]
    policy._begin_with(sums)
    return policy


def test_the_policy_leaves_a_busy_star_and_comes_back(tmp_path: Path) -> None:
    sums = ScriptedSums(4, "star")
    switched: list[str] = []
    at: list[int] = []

    def switch(topology: Any) -> None:
        sums.summing.topology = topology
        switched.append(topology.name)

    strategy = SimpleNamespace(sums=sums, switch_topology=switch)
    trainer: Any = SimpleNamespace(
        strategy=strategy, global_step=0, world_size=4, is_global_zero=True, log_dir=str(tmp_path / "run")
    )
    policy = begun(InterferencePolicy(probe_every=10, cooldown=10), sums)
    for step in range(1, 200):
        trainer.global_step = step
        sums.busy = 50 <= step < 120
        slow = sums.busy and sums.topology.name == "star"
        sums.step_s = 50.0 if slow else 40.0
        rate = 30.0 if slow else 100.0
        policy._monitor.links = [[(rate, 1.0)] * 4 for _ in range(4)]
        change = policy.decide(trainer)
        if change is not None:
            change.apply(trainer)
            at.append(step)
    assert switched == ["star@1", "star@2", "star@1", "star"], "two in turn, the first of equals, and back"
    assert 50 <= at[0] <= 55
    assert at[1:3] == [at[0] + 2, at[0] + 4]
    assert 120 <= at[3] <= 145
    assert [event["what"] for event in policy.events] == ["alarm", "turn", "choice", "revert"]
    assert policy.events[1]["seconds"] == {"star@1": 40.0}, "as it was known then"
    assert policy.events[0]["votes"] == 4
    votes = {one.step: one.votes for one in policy.steps}
    assert votes[at[0]] == 4
    assert votes[at[3]] == votes[30] == 0
    policy.on_train_end(trainer, None)  # type: ignore[arg-type]
    assert (tmp_path / "run" / "topology.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("steps_s", "changes"),
    [
        ({}, [("star", "clique"), ("clique", "ring"), ("ring", "star")]),
        ({"ring": 4.0}, [("star", "clique"), ("clique", "ring"), ("ring", None)]),
        ({"ring": 4.0, "clique": 3.0}, [("star", "clique"), ("clique", "ring"), ("ring", "clique")]),
    ],
    ids=["none", "the last", "the first"],
)
def test_steps_decide_and_no_lucky_trial(steps_s: dict[str, float], changes: list[tuple[str, str | None]]) -> None:
    """All links are slow, and a short trial flatters two of the candidates."""

    class Flattering(ScriptedSums):
        def trial(self, topologies: Any, *, turns: int = 3, whole: bool = False, **_: Any) -> dict[str, float]:
            lucky = {} if whole else {"clique": 0.3, "ring": 0.4}
            usual = 1.0 if self.busy else 0.5
            return {topology.name: lucky.get(topology.name, usual) for topology in topologies}

    sums = Flattering(4, "star")
    strategy = SimpleNamespace(sums=sums, switch_topology=lambda topology: setattr(sums.summing, "topology", topology))
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, world_size=4, is_global_zero=True)
    policy = begun(InterferencePolicy(), sums)
    for step in range(1, 40):
        trainer.global_step = step
        sums.busy = step > 20
        sums.step_s = steps_s.get(sums.topology.name, 5.0)
        policy._monitor.links = [[(30.0 if sums.busy else 100.0, 1.0)] * 4 for _ in range(4)]
        change = policy.decide(trainer)
        if change is not None:
            change.apply(trainer)
    assert [(event["present"], event["best"]) for event in policy.events] == changes
    assert sums.topology.name == (min(steps_s, key=steps_s.__getitem__) if steps_s else "star")


@pytest.mark.parametrize(("ring_s", "first"), [(0.4, ["clique", "ring"]), (0.6, ["clique"])])
def test_a_clear_favourite_has_no_rivals(ring_s: float, first: list[str]) -> None:
    class Clear(ScriptedSums):
        def trial(self, topologies: Any, *, turns: int = 3, whole: bool = False, **_: Any) -> dict[str, float]:
            seconds = {"clique": 0.3, "ring": ring_s}
            return {one.name: seconds.get(one.name, 1.0 if self.busy else 0.5) for one in topologies}

    sums = Clear(4, "star")
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(), sums)
    sums.busy, sums.step_s = True, 5.0
    assert policy._alternative(trainer, sums.topology).topology.name == "clique"
    assert policy._race[0].names == first


def test_where_nothing_is_quicker_in_a_trial_nothing_changes() -> None:
    class Even(ScriptedSums):
        def trial(self, topologies: Any, *, turns: int = 3, whole: bool = False, **_: Any) -> dict[str, float]:
            return {one.name: (2.0 if self.busy else 1.0) + (one.name != "star") for one in topologies}

    sums = Even(4, "star")
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(cooldown=30), sums)
    for step in range(1, 40):
        trainer.global_step = step
        sums.busy = step > 20
        policy._monitor.links = [[(30.0 if sums.busy else 100.0, 1.0)] * 4 for _ in range(4)]
        assert policy.decide(trainer) is None
    assert [(event["what"], event["best"]) for event in policy.events] == [("alarm", None)]


@pytest.mark.parametrize(("step_s", "changes"), [(50.0, True), (500.0, False)])
def test_what_a_step_would_not_notice_changes_nothing(step_s: float, changes: bool) -> None:
    sums = ScriptedSums(4, "star")  # whose sums take 3 s, and 9 s where the centre's link is shared
    sums.step_s = step_s
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(), sums)
    for step in range(1, 40):
        trainer.global_step = step
        sums.busy = step > 20
        policy._monitor.links = [[(30.0 if sums.busy else 100.0, 1.0)] * 4 for _ in range(4)]
        if policy.decide(trainer) is not None:
            break
    assert [event["best"] is not None for event in policy.events[:1]] == [changes]


@pytest.mark.parametrize("name", ["star", "native"])
def test_messages_that_are_late_while_sums_take_no_longer_change_nothing(name: str) -> None:
    """On a busy machine, say. The other topologies are quicker, as they were when the first one was chosen."""

    class Quicker(ScriptedSums):
        def trial(self, topologies: Any, *, turns: int = 3, whole: bool = False, **_: Any) -> dict[str, float]:
            tried.append([topology.name for topology in topologies])
            single = 0.3 if turns == 1 and self.busy else 0.1  # by which native sums are watched
            return {topology.name: single if topology.name == name else 0.01 for topology in topologies}

    tried: list[list[str]] = []
    sums = Quicker(4, name)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(cooldown=20, probe_every=2), sums)
    for step in range(1, 200):
        trainer.global_step = step
        sums.busy = step > 100
        policy._monitor.links = [[(30.0 if sums.busy else 100.0, 1.0)] * 4 for _ in range(4)]
        assert policy.decide(trainer) is None
    assert {(event["what"], event["best"]) for event in policy.events} == {("alarm", None)}
    steps = [event["step"] for event in policy.events]
    assert len(steps) == 4, "with longer and longer pauses, and then it is the usual"
    assert steps[1] - steps[0] < steps[2] - steps[1] < steps[3] - steps[2]
    assert {len(names) for names in tried} == {1}, "the others were not tried"


@pytest.mark.parametrize("chosen", ["ring", "the same"])
def test_what_somebody_else_switches_to_is_the_one_to_come_back_to(chosen: str) -> None:
    """The policy leaves a busy star; then the user chooses a topology, also the one that the policy has found."""
    sums = ScriptedSums(4, "star")
    strategy = SimpleNamespace(sums=sums, switch_topology=lambda topology: setattr(sums.summing, "topology", topology))
    trainer: Any = SimpleNamespace(strategy=strategy, global_step=0, world_size=4, is_global_zero=True)
    policy = begun(InterferencePolicy(cooldown=10), sums)
    over = []
    for step in range(1, 200):
        trainer.global_step = step
        sums.busy = 50 <= step < 120
        slow = {"star": 30.0, "ring": 20.0} if sums.busy else {}
        sums.step_s = 50.0 if sums.topology.name in slow else 40.0
        policy._monitor.links = [[(slow.get(sums.topology.name, 100.0), 1.0)] * 4 for _ in range(4)]
        change = policy.decide(trainer)
        if change is not None:
            change.apply(trainer)
        if step == 80:
            found = sums.topology.name
            sums.summing.topology = topology_of(found if chosen == "the same" else chosen, sums.hosts)
        over.append(sums.topology.name)
    assert set(over[:49]) == {"star"}
    assert set(over[65:79]) == {found}
    assert found.startswith("star@")
    assert set(over[80:]) == {found if chosen == "the same" else chosen}, "a new reference, and no way back to the star"


def test_a_measurement_counts_once_however_long_it_stands() -> None:
    """A user's LinkThroughput(interval=10) has other links after ten steps only."""
    sums = ScriptedSums(4, "star")
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(warmup=0, window=3, smooth=1, patience=2), sums)
    for step in range(1, 60):
        trainer.global_step = step
        if step % 10 == 0:
            policy._monitor.links = [[(30.0 if step == 50 else 100.0, 1.0)] * 4 for _ in range(4)]
        assert policy.decide(trainer) is None
    assert not policy.events


def test_over_another_topology_some_steps_are_not_watched() -> None:
    """Two batches a step. The watch rests, and is not begun anew: ranks would compare their clocks over busy links."""
    sums, watch = ScriptedSums(4, "ring"), object()
    sums.summing.watch = watch
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, fit_loop=SimpleNamespace(_should_accumulate=lambda: False)
    )
    monitor = LinkThroughput()
    monitor.every = 3
    monitor._hear = lambda _: None  # type: ignore[method-assign]
    watched = []
    for step in range(1, 8):
        trainer.global_step = step
        for _ in range(2):
            monitor.on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
        watched.append(sums.summing.watch is watch)
        if not watched[-1]:
            trainer.global_step = step + 1
            monitor.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
            assert sums.summing.watch is watch
    assert watched == [False, False, True, False, False, True, False]


@pytest.mark.parametrize(("own", "every"), [(True, 4), (False, 1)])
def test_a_monitor_of_the_users_own_watches_as_often_as_ever(own: bool, every: int) -> None:
    sums = ScriptedSums(4, "star")
    policy = begun(InterferencePolicy(), sums)
    policy._monitor, policy._may_rest = LinkThroughput(), own
    trainer: Any = SimpleNamespace(global_step=3)
    policy._switch_to(trainer, topology_of("ring", sums.hosts))
    assert policy._monitor.every == every
    policy._switch_to(trainer, policy._home)
    assert policy._monitor.every == 1


def test_no_topology_no_switch() -> None:
    trainer: Any = SimpleNamespace(strategy=object())
    with pytest.raises(ConfigError, match="has no topology to switch; set strategy=adaptive"):
        SwitchTopology("ring").apply(trainer)
    with pytest.raises(ConfigError, match="interval=0 is no number of steps"):
        Policy(interval=0)
    assert repr(SwitchTopology([0, 0, 1])) == "SwitchTopology([0, 0, 1])"


def test_a_topology_of_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pl_pipe.comm.topology.adaptable.require_consensus", lambda *_, **__: None)
    sums: Any = SimpleNamespace(ranks=3, control=None, summing=SimpleNamespace(switch=pytest.fail))
    with pytest.raises(ConfigError, match=r"ring is a topology of 1 rank\(s\), and 3 sum together"):
        AdaptableSums.switch(sums, topology_of("ring", ["one"]))


def test_a_change_that_cannot_be_told_is_the_policys_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Untold:
        def __repr__(self) -> str:
            raise ValueError("no words")

    class Asks(Policy):
        def decide(self, trainer: Any) -> Any:
            return Untold()

    policy, trainer = Asks(on_error="continue"), SimpleNamespace(world_size=1, is_global_zero=True, global_rank=0)
    with caplog.at_level("WARNING", logger="pl_pipe"):
        policy.consider(trainer)  # type: ignore[arg-type]
    assert policy.failed
    assert "ValueError: no words" in caplog.text


def test_who_wants_no_change_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what the others decided lost where the next decision comes before the next step."""

    class Votes:
        agreed = False

        def wait(self) -> Any:
            asked.append("waited")
            return self

    class Mine(Policy):
        def decide(self, trainer: Any) -> Any:
            asked.append("decided")

    asked: list[str] = []
    monkeypatch.setattr("pl_pipe.adapt.policies.base.ask_all", lambda *_, **__: Votes())
    monkeypatch.setattr(Mine, "_gathered", lambda *_: [(False, "None"), (False, "Another()")])
    policy, trainer = Mine(), SimpleNamespace(world_size=2, is_global_zero=True, global_rank=0)
    policy._group = object()
    policy.consider(trainer)  # type: ignore[arg-type]
    assert asked == ["decided"]
    with pytest.raises(PolicyError, match=r"decided differently: rank 0 wants None, rank 1 wants Another\(\)"):
        policy.consider(trainer)  # type: ignore[arg-type]
    assert asked == ["decided", "waited"]


def test_links_of_another_topology_or_of_no_message_are_not_judged() -> None:
    sums = ScriptedSums(4, "star")
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(sums=sums), global_step=0, world_size=4, is_global_zero=True
    )
    policy = begun(InterferencePolicy(), sums)
    policy._switched_at = 5
    judged = []
    policy._detector = SimpleNamespace(observe=lambda *_, **__: judged.append(trainer.global_step), votes=())
    for step, (seconds, measured) in enumerate([(1.0, 4), (1.0, 5), (0.0, 6), (1.0, 7)], start=6):
        trainer.global_step = step
        policy._monitor.links = [[(100.0, seconds)] * 4 for _ in range(4)]
        policy._monitor.measured_step = measured
        policy.decide(trainer)
    assert judged == [7, 9]


def test_cooldown_is_in_steps_however_seldom_links_are_measured() -> None:
    detector = Interference(1, InterferenceSettings(warmup=0, window=2, smooth=1, patience=1, cooldown=20))
    for _ in range(2):
        detector.observe([1.0], steps=10)
    assert detector.observe([0.5], steps=10)
    detector.rest()
    assert [detector.observe([0.5], steps=10) for _ in range(2)] == [False, True]


# ---- batch sizes


def test_batches_follow_the_noise_scale_within_limits() -> None:
    rule = BatchSizeRule(least=16, most=256)
    assert rule.size(32, 1000.0, multiple=4) == 64, "no more than twice at a time"
    assert rule.size(200, 1000.0, multiple=4) == 256
    assert rule.size(256, 1000.0, multiple=4) == 256
    assert rule.size(32, 50.0, multiple=4) == 48
    assert rule.size(32, 36.0, multiple=4) == 32, "not worth it"
    assert rule.size(32, 1.0, multiple=4) == 32, "it does not shrink"
    assert rule.size(32, math.nan, multiple=4) == 32
    smaller = BatchSizeRule(least=20, most=256, shrinks=True)
    assert smaller.size(64, 1.0, multiple=8) == 32
    assert smaller.size(32, 1.0, multiple=8) == 24
    assert BatchSizeRule(at_once=1.25).size(32, 1000.0, multiple=4) == 40, "as much as it must change at all"
    assert rule.size(32, 1000.0, multiple=4, samples=50) == 48, "no more than there are"
    assert rule.size(48, 1000.0, multiple=4, samples=50) == 48


def test_learning_rates_follow_by_a_stated_rule() -> None:
    def factor(rate: str, noise_scale: float = 64.0) -> float:
        return BatchSizeRule(rate=rate).rate_factor(32, 128, noise_scale)

    assert factor("linear") == 4.0
    assert factor("sqrt") == 2.0
    assert factor("none") == 1.0
    assert factor("adascale") == pytest.approx((64 / 32 + 1) / (64 / 128 + 1))
    assert factor("adascale", 1e9) == pytest.approx(4.0, rel=1e-3), "all noise: as linear"
    assert factor("adascale", 0.0) == 1.0, "no noise: larger batches gain nothing"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"least": 64, "most": 32}, "least=64 and most=32 contradict each other"),
        ({"rate": "cubic"}, "rate=cubic is unknown; choose one of none, linear"),
        ({"at_once": 1.0}, "at_once=1.0 must be more than 1"),
        (
            {"at_once": 1.2},
            r"at_once=1.2 is below margin=1.25, so that the batch would never change; choose margin <= at",
        ),
        ({"sizes": 3}, "NoiseBatchPolicy has no setting sizes=3; its rule has least, most"),
        ({"least": "abc"}, "least='abc' is no whole number"),
        ({"margin": float("nan")}, "margin=nan is no number"),
        ({"shrinks": "no"}, "shrinks='no'; give true or false"),
        ({"every_steps": 0}, "every_steps=0 is no number of steps"),
        ({"every_steps": 2.5}, "every_steps=2.5 is no whole number"),
        ({"keep": 1.5}, "keep=1.5 is no share"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        NoiseBatchPolicy(**settings)


def test_the_noise_is_measured_once_by_one_setting() -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(Numbered())

    def measured(policy: NoiseBatchPolicy, *beside: Any) -> tuple[int, float]:
        trainer.callbacks = [*beside, policy]  # type: ignore[attr-defined]
        policy.setup(trainer, trainer.lightning_module, "fit")
        (monitor,) = (one for one in trainer.callbacks if isinstance(one, GradientNoiseScale))  # type: ignore[attr-defined]
        assert policy._monitor is monitor
        return monitor.interval, monitor.estimate.keep

    assert measured(NoiseBatchPolicy()) == (1, 0.95)
    assert measured(NoiseBatchPolicy(interval=3, keep=0.5)) == (3, 0.5)
    assert measured(NoiseBatchPolicy(), GradientNoiseScale(interval=7)) == (7, 0.95)
    assert measured(NoiseBatchPolicy(interval=7, keep=0.9), GradientNoiseScale(interval=7, keep=0.9)) == (7, 0.9)
    for given, words in (
        ({"keep": 0.5}, r"has keep=0\.5, and the GradientNoiseScale by which it decides has keep=0\.95"),
        (
            {"interval": 1, "keep": 0.95},
            "has interval=1, and the GradientNoiseScale by which it decides has interval=7",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            measured(NoiseBatchPolicy(**given), GradientNoiseScale(interval=7))


@pytest.mark.parametrize("order", [BATCHES, BATCHES_ALONE], ids=["two ranks", "one"])
def test_the_loader_really_changes(farm: Farm, order: Order) -> None:
    """Sixty samples in batches of 4 in all, then 8, then 16; every sample once an epoch."""
    ranks = order.ranks
    outcome = farm.start(order).outcome
    for result in outcome:
        assert result["sizes"] == [4, 8, 16, 16]
        assert [len(epoch) for epoch in result["seen"]] == [15, 8, 4, 4]
        assert [max(len(batch) for batch in epoch) for epoch in result["seen"]] == [
            size // ranks for size in result["sizes"]
        ]
        assert result["rates"] == pytest.approx([0.5, 1.0 * 0.9, 2.0 * 0.81, 2.0 * 0.729])
        assert result["validated"] == 4
        assert result["resumed"] == [16]
    for epoch in range(4):
        everyone = [sample for result in outcome for batch in result["seen"][epoch] for sample in batch]
        assert sorted(everyone) == list(range(60))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("every_steps", [None, 1])
def test_a_batch_never_outgrows_the_data(drop_last: bool, every_steps: int | None) -> None:
    """Lightning would take an epoch without batches for the end."""
    module, policy = Numbered(), Known(rate="linear", every_steps=every_steps)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=6, callbacks=[policy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    data = TensorDataset(torch.arange(60.0).view(-1, 1))
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True, drop_last=drop_last))
    assert len(module.seen) == 6
    assert policy.sizes[-1] == 60
    assert [len(batch) for batch in module.seen[-1]] == [60]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5 * 60 / 16 * 0.9**6)


def test_a_size_that_cannot_be_counted_is_not_half_taken(caplog: pytest.LogCaptureFixture) -> None:
    module, policy = Numbered(), Known(on_error="continue", rate="linear")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[policy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, limit_train_batches=0.1,
    )  # fmt: skip
    data = TensorDataset(torch.arange(40.0).view(-1, 1))
    with caplog.at_level("WARNING", logger="pl_pipe"):
        trainer.fit(module, DataLoader(data, batch_size=4))
    assert "nothing was changed" in caplog.text
    assert [[len(batch) for batch in epoch] for epoch in module.seen] == [[4]] * 3


@pytest.mark.parametrize("steps", [2, 5, 8])
def test_an_epoch_of_several_sizes_is_gone_on_with_at_its_sample(tmp_path: Path, steps: int) -> None:
    """Sizes of 3, then 6, then 12 of 60 samples in their order; a checkpoint after some steps."""

    def run(**settings: Any) -> Numbered:
        module = Numbered()
        module.seen.append([])
        keeps = ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=steps, save_top_k=-1)
        path = settings.pop("path", None)
        trainer = L.Trainer(
            accelerator="cpu", callbacks=[Known(every_steps=3, most=12, rate="none"), keeps], logger=False,
            enable_progress_bar=False, enable_model_summary=False, **settings,
        )  # fmt: skip
        data = TensorDataset(torch.arange(60.0).view(-1, 1))
        trainer.fit(module, DataLoader(data, batch_size=3), ckpt_path=path)
        return module

    first = run(max_steps=steps).seen[-1]
    rest, *whole = run(max_epochs=2, path=tmp_path / "kept.ckpt").seen
    trained = [sample for batch in [*first, *rest] for sample in batch]
    assert trained == list(range(60))
    assert [sample for epoch in whole for batch in epoch for sample in batch] == list(range(60))


def test_an_epoch_that_is_gone_on_with_keeps_its_order(tmp_path: Path) -> None:
    """The second of two, from its fifth step on; its sampler is told the epoch after the loader has begun."""

    def run(*more: Any, path: Path | None = None, **settings: Any) -> Numbered:
        module = Numbered()
        if path is not None:
            module.seen.append([])  # of the epoch that is gone on with
        trainer = L.Trainer(
            accelerator="cpu", callbacks=[Known(every_steps=3, most=6, rate="none"), *more], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=bool(more), **settings,
        )  # fmt: skip
        data = TensorDataset(torch.arange(60.0).view(-1, 1))
        order = DistributedSampler(data, num_replicas=1, rank=0)
        trainer.fit(module, DataLoader(data, batch_size=3, sampler=order), ckpt_path=path)
        return module

    whole = run(max_epochs=2)
    steps = len(whole.seen[0]) + 4
    first = run(ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=steps), max_steps=steps)
    rest = run(max_epochs=2, path=tmp_path / "kept.ckpt")
    assert [*first.seen[1], *rest.seen[0]] == whole.seen[1]
    assert first.seen[0] == whole.seen[0] != whole.seen[1]


def test_a_loader_may_begin_again_within_an_epoch() -> None:
    """Of two loaders the first is the shorter."""

    class OfBoth(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[1], batch_idx)

    policy, module = Known(every_steps=1, most=4, rate="none"), OfBoth()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[policy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    short, long = (
        DataLoader(TensorDataset(torch.arange(float(length)).view(-1, 1)), batch_size=2) for length in (6, 30)
    )
    trainer.fit(module, CombinedLoader([short, long], "max_size_cycle"))
    assert trainer.global_step > 3


def test_a_batch_that_shrinks_makes_more_steps() -> None:
    module, policy = Numbered(), Known(Small(), shrinks=True, least=2, rate="none")
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[policy], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = TensorDataset(torch.arange(16.0).view(-1, 1))
    trainer.fit(module, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16))
    assert policy.sizes == [8, 4, 2]
    assert [len(epoch) for epoch in module.seen] == [2, 4, 8]
    for epoch in module.seen:
        assert sorted(sample for batch in epoch for sample in batch) == list(range(16))
    assert module.validated == 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_batch_may_change_within_an_epoch(workers: int, drop_last: bool, seed: int) -> None:
    """Sizes that chance chooses after every step or two: every sample once, and the loop knows where the epoch ends."""
    draws, lasts = random.Random(seed), list[bool]()

    class Chance(NoiseBatchPolicy):
        def decide(self, trainer: Any) -> Any:
            return ResizeBatch(draws.choice([1, 2, 3, 5, 8]))

    class Last(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            lasts.append(trainer.is_last_batch)

    module, policy = Numbered(), Chance(every_steps=1 + seed % 2)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=3, callbacks=[policy, Last()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
    )  # fmt: skip
    data = TensorDataset(torch.arange(61.0).view(-1, 1))
    loader = DataLoader(data, batch_size=4, shuffle=True, drop_last=drop_last, num_workers=workers)
    trainer.fit(module, loader, DataLoader(data, batch_size=61))
    assert module.validated == 3
    for epoch in module.seen:
        samples = [sample for batch in epoch for sample in batch]
        assert len(set(samples)) == len(samples)
        assert drop_last or len(samples) == 61
    assert len({len(batch) for epoch in module.seen for batch in epoch}) > 2
    ends = list(itertools.accumulate(len(epoch) for epoch in module.seen))
    assert [step for step, last in enumerate(lasts, 1) if last] == ends


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_until_a_batch_changes_training_is_as_without_a_policy(workers: int, seed: int) -> None:
    """Random numbers of the data, the order and the step; 61 samples in batches of 4."""

    class Noisy(TensorDataset):
        def __getitem__(self, place: int) -> Any:
            return (super().__getitem__(place)[0] + torch.rand(1),)

    class Drops(Numbered):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((torch.nn.functional.dropout(batch[0]),), batch_idx)

    def run(*policies: NoiseBatchPolicy) -> tuple[list[Any], float]:
        L.seed_everything(seed, verbose=False)
        module = Drops()
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=2, callbacks=list(policies), logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        )  # fmt: skip
        data = Noisy(torch.arange(61.0).view(-1, 1))
        trainer.fit(module, DataLoader(data, batch_size=4, shuffle=True, num_workers=workers))
        return module.seen, float(module.w.detach())

    assert run(NoiseBatchPolicy(least=4, most=4, every_steps=1)) == run()


def test_the_order_is_that_of_the_epoch_that_is_told_last() -> None:
    order = DistributedSampler(range(20), num_replicas=2, rank=1)
    plain, resizable = BatchSampler(order, 3, False), BatchSampler(order, 3, False)
    assert ResizableBatches.become(resizable)
    batches = [iter(plain), iter(resizable)]
    order.set_epoch(3)
    first, second = map(list, batches)
    assert first == second


def test_a_strategy_without_whole_gradients_is_refused_by_the_policys_name() -> None:
    trainer: Any = SimpleNamespace(strategy=object(), callbacks=[])
    with pytest.raises(ConfigError, match=r"^NoiseBatchPolicy compares the ranks' gradients .*, which object does not"):
        NoiseBatchPolicy().setup(trainer, Numbered(), "fit")
    assert not trainer.callbacks


def test_a_loader_that_has_given_batches_or_is_of_another_kind_is_not_taken_over() -> None:
    loader = DataLoader(range(12), batch_size=4)
    begun = iter(loader)
    next(begun)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert ResizableBatches.become(loader.batch_sampler)
    assert isinstance(loader.batch_sampler, ResizableBatches)
    assert not loader.batch_sampler.take_over(begun)
    assert not loader.batch_sampler.take_over(iter([]))
    assert loader.batch_sampler.take_over(iter(loader))


@pytest.mark.parametrize("shrinks", [False, True])
def test_an_epoch_that_follows_one_gone_on_with_is_counted_anew(tmp_path: Path, shrinks: bool) -> None:
    """From a checkpoint of an epoch's middle: that epoch ends as it began, and the next has other batches."""

    def run(epochs: int, *more: Any, path: Path | None = None, **settings: Any) -> Numbered:
        module = Numbered()
        module.seen.append([])  # of the epoch that is gone on with
        policy = Known(Small() if shrinks else Large(), shrinks=shrinks, least=2, most=8, rate="none")
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=epochs, callbacks=[policy, *more], logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=bool(more), num_sanity_val_steps=0, **settings,
        )  # fmt: skip
        data = TensorDataset(torch.arange(24.0).view(-1, 1))
        trainer.fit(
            module, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=24), ckpt_path=path
        )
        return module

    run(1, ModelCheckpoint(dirpath=tmp_path, filename="kept", every_n_train_steps=2), max_steps=2)
    module = run(3, path=tmp_path / "kept.ckpt")
    size = 2 if shrinks else 8
    assert [len(epoch) for epoch in module.seen] == [4, 24 // size, 24 // size]
    assert module.validated == 3
    for epoch in module.seen[1:]:
        assert sorted(sample for batch in epoch for sample in batch) == list(range(24))


def test_batches_that_cannot_change_within_an_epoch_are_refused() -> None:
    class Pairs(BatchSampler):
        pass

    data = TensorDataset(torch.arange(8.0).view(-1, 1))
    for limit, loader, words in (
        (1.0, DataLoader(data, batch_sampler=Pairs(range(8), 2, False)), "the batches of a Pairs cannot change within"),
        (0.5, DataLoader(data, batch_size=2), "limit_train_batches=0.5: a share of an epoch whose batches change"),
    ):
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, callbacks=[NoiseBatchPolicy(every_steps=1)], logger=False,
            limit_train_batches=limit, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            trainer.fit(Numbered(), loader)


def test_two_ranks_change_their_batches_within_an_epoch(farm: Farm) -> None:
    outcome = farm.start(WITHIN).outcome
    for result in outcome:
        assert [len(batch) for batch in result["seen"][0]] == [2, 2, 4, 4, 8, 8, 2]
    for epoch in range(2):
        everyone = [sample for result in outcome for batch in result["seen"][epoch] for sample in batch]
        assert sorted(everyone) == list(range(60))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"most": 3}, "begins with 4 samples of all ranks a step, and least=1 and most=3 are the limits"),
        ({"least": 8}, "begins with 4 samples of all ranks a step, and least=8 and most=4096 are the limits"),
    ],
)
def test_a_batch_beyond_the_limits_is_refused(limits: dict[str, int], words: str) -> None:
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[NoiseBatchPolicy(**limits)], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        trainer.fit(Numbered(), DataLoader(TensorDataset(torch.arange(8.0).view(-1, 1)), batch_size=4))


SCHEDULES: dict[str, Any] = {
    "lambda": lambda one: schedules.LambdaLR(one, lambda step: 1 / (1 + step)),
    "cosine": lambda one: schedules.CosineAnnealingLR(one, 12),
    "warm restarts": lambda one: schedules.CosineAnnealingWarmRestarts(one, 4),
    "one cycle": lambda one: schedules.OneCycleLR(one, max_lr=1.0, total_steps=14),
    "cyclic": lambda one: schedules.CyclicLR(one, base_lr=0.1, max_lr=0.5, step_size_up=3),
    "warm-up, then cosine": lambda one: schedules.SequentialLR(
        one, [schedules.LinearLR(one, 0.1, total_iters=4), schedules.CosineAnnealingLR(one, 8)], milestones=[6]
    ),
    "two lambdas, one after the other": lambda one: schedules.SequentialLR(
        one, [schedules.LambdaLR(one, lambda _: 0.5), schedules.LambdaLR(one, lambda _: 0.25)], milestones=[6]
    ),
    "chained": lambda one: schedules.ChainedScheduler(
        [schedules.ConstantLR(one, 0.5, total_iters=7), schedules.ExponentialLR(one, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_with_the_factor(name: str) -> None:
    rates: dict[float, list[float]] = {1.0: [], 2.0: []}
    for factor, found in rates.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        trainer: Any = SimpleNamespace(
            optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=schedule)]
        )
        for step in range(12):
            if step == 3:
                scale_rates(trainer, factor)
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    assert rates[2.0][:3] == rates[1.0][:3]
    assert rates[2.0][3:] == pytest.approx([2 * rate for rate in rates[1.0][3:]])


# ---- policies of users


def test_a_policy_that_raises_on_one_rank_stops_all(farm: Farm) -> None:
    for error in farm.start(RAISES).errors:
        assert "policy Mine failed on rank 1: ValueError: no such day" in error
        assert "set on_error=continue to train on without it. Nothing was changed" in error


def test_a_policy_that_raises_may_be_left_behind(farm: Farm) -> None:
    for result in farm.start(GOES_ON).outcome:
        assert result["steps"] == 6
        assert result["failed"]
        assert result["topology"] == "star"


def test_ranks_that_decide_differently_change_nothing(farm: Farm) -> None:
    for error in farm.start(DIFFERS).errors:
        assert "policy Mine decided differently: rank 0 wants SwitchTopology(ring), rank 1 wants " in error


def test_a_rank_that_alone_wants_a_change_is_named_by_all(farm: Farm) -> None:
    """The others want none and wait for nobody; they hear of it after the next step, or when the training ends."""
    for order in (ALONE, ALONE_AT_THE_END):
        for error in farm.start(order).errors:
            assert "policy Mine decided differently: rank 0 wants None, rank 1 wants SwitchTopology(ring)" in error
    for result in farm.start(ALONE_GOES_ON).outcome:
        assert result["steps"] == 6
        assert result["failed"]
        assert result["topology"] == "star"


def test_a_change_that_cannot_be_made_is_the_policys_failure(farm: Farm) -> None:
    for error in farm.start(WRONG).errors:
        assert "policy Mine wanted SwitchTopology(rign), which failed on rank 0: ConfigError: topology=rign is" in error
        assert "Nothing was changed" in error
    for result in farm.start(WRONG_GOES_ON).outcome:
        assert result["steps"] == 6
        assert result["failed"]
        assert result["topology"] == "star"


def test_a_change_that_some_ranks_have_made_ends_the_run(farm: Farm) -> None:
    for error in farm.start(HALF_MADE).errors:
        assert "policy Mine wanted Half(), which failed on rank 1: OSError: no space; other ranks have changed" in error


def test_a_policy_that_cannot_compare_says_so() -> None:
    class Mine(Policy):
        def on_train_start(self, *_: Any) -> None:
            """Without that of Policy."""

    trainer: Any = SimpleNamespace(world_size=2, global_step=1, is_global_zero=True)
    with pytest.raises(ConfigError, match=r"call super\(\).on_train_start\(trainer, pl_module\) in it"):
        Mine().consider(trainer)


def test_a_policy_of_ones_own(farm: Farm) -> None:
    for result in farm.start(TEN_LINES).outcome:
        assert result["topology"] == "ring"
        assert all(torch.isfinite(value).all() for value in result["weights"].values())


def test_a_topology_of_ones_own_choice_is_not_undone(farm: Farm) -> None:
    """The strategy adapts, and every trial finds the first topology as quick as it was."""
    for result in farm.start(BESIDE).outcome:
        assert result["steps"] == 12
        assert result["topology"] == "ring"
