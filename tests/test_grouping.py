"""The group former over any order of arrivals, departures and delays; weights, matchings and clocks."""

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_pipe.errors import ConfigError
from pl_pipe.grouping import Group, GroupFormer, GroupRules, WaveClocks, matchings, weights
from pl_pipe.grouping.connectivity import Connectivity

EPSILON_S = 1e-9
History = tuple[GroupRules, int, list[tuple[str, int, float]]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Rules, workers, and what befalls whom how much later; `rest` workers are made to arrive by the test itself."""
    workers = draw(st.integers(2, 11))
    rules = GroupRules(
        group_size=draw(st.sampled_from([None, 2, 3])),
        connect_every=draw(st.integers(1, 4)),
        pairs_above=draw(st.sampled_from([2, 8])),
    )
    event = st.tuples(
        st.sampled_from(["arrive"] * 30 + ["leave", "join"]), st.integers(0, workers - 1), st.floats(0.0, 0.02)
    )
    return rules, workers, draw(st.lists(event, max_size=150))


class Played:
    """Plays a history as a coordinator would: time stops at every deadline on the way."""

    def __init__(self, rules: GroupRules, workers: int) -> None:
        self.former = GroupFormer(range(workers), rules)
        self.now_s = 0.0
        self.waiting: dict[int, float] = {}
        self.groups: list[Group] = []
        self.present_at: list[set[int]] = []

    def play(self, events: list[tuple[str, int, float]]) -> None:
        for kind, worker, later_s in events:
            self.pass_until(self.now_s + later_s)
            if kind == "arrive" and worker in self.former.present and worker not in self.waiting:
                self.waiting[worker] = self.now_s
                self.take(self.former.arrive(worker, self.now_s))
            elif kind == "leave" and len(self.former.present) > 1:
                self.waiting.pop(worker, None)
                self.take(self.former.leave(worker, self.now_s))
            elif kind == "join":
                self.former.join(worker)

    def pass_until(self, then_s: float) -> None:
        deadline_s = self.former.deadline_s
        if deadline_s is not None and deadline_s <= then_s:
            self.now_s = deadline_s
            self.take(self.former.elapse(self.now_s))
            assert self.former.deadline_s is None or self.former.deadline_s > self.now_s
        self.now_s = then_s

    def take(self, groups: list[Group]) -> None:
        for group in groups:
            for member, waited_s in zip(group.members, group.waited_s, strict=True):
                assert waited_s == pytest.approx(self.now_s - self.waiting.pop(member))
                if not group.connects:
                    assert waited_s <= self.former.rules.longest_wait_s + EPSILON_S
            self.groups.append(group)
            self.present_at.append(set(self.former.present))
        assert set(self.former.ready) == set(self.waiting)


@given(histories())
def test_no_worker_is_lost_and_none_waits_for_ever(history: History) -> None:
    rules, workers, events = history
    played = Played(rules, workers)
    played.play(events)
    for _ in range(workers):  # those that computed come again, at most once each until all stand here
        if played.former.deadline_s is not None:
            played.pass_until(played.former.deadline_s)
        elif played.waiting:
            worker = min(played.former.present - set(played.waiting))
            played.waiting[worker] = played.now_s
            played.take(played.former.arrive(worker, played.now_s))
    assert not played.waiting
    assert [group.number for group in played.groups] == list(range(len(played.groups)))
    for group in played.groups:
        assert list(group.members) == sorted(set(group.members))
        if rules.group_size is not None and not group.connects:
            assert len(group.members) <= rules.group_size


@given(histories())
def test_all_workers_are_connected_within_the_rounds(history: History) -> None:
    rules, workers, events = history
    played = Played(rules, workers)
    played.play([event for event in events * 3 if event[0] == "arrive"])
    seen, arrivals = Connectivity(), 0
    for group in played.groups:
        seen.merge(group.members)
        arrivals += len(group.members)
        if group.connects:
            assert seen.connects(range(workers))
            seen, arrivals = Connectivity(), 0
        else:
            assert arrivals < (rules.connect_every + 1) * workers


@given(histories())
def test_pairs_above_a_size(history: History) -> None:
    rules, workers, events = history
    played = Played(rules, workers)
    played.play([event for event in events if event[0] == "arrive"])
    if workers > rules.pairs_above:
        assert all(len(group.members) <= 2 for group in played.groups if not group.connects)


def test_groups_as_they_close() -> None:
    """The picture: who arrives when, and what that closes."""
    former = GroupFormer(range(4), GroupRules(first_wait_s=0.002, connect_every=1))
    said = []
    for now_ms, what in [(0, 2), (1, 0), (2, None), (3, 1), (4, 3), (5, None), (6, 0), (7, 1), (8, 2), (9, 3)]:
        now_s = now_ms / 1000
        groups = former.elapse(now_s) if what is None else former.arrive(what, now_s)
        line = " ".join(f"{set(group.members)}{'*' if group.connects else ''}" for group in groups)
        said.append(f"{now_ms} {'-' if what is None else what} {line}".rstrip())
    assert said == ["0 2", "1 0", "2 - {0, 2}", "3 1", "4 3", "5 - {1, 3}", "6 0", "7 1 {0, 1}*", "8 2", "9 3"]


def test_the_wait_adapts() -> None:
    former = GroupFormer(range(3), GroupRules(first_wait_s=0.004, longest_wait_s=0.01, connect_every=99))
    waits = []
    for _ in range(3):
        former.arrive(0, 0.0)
        waits.append(former.deadline_s)
        former.elapse(1.0)
    former.arrive(0, 0.0)
    former.arrive(1, 0.0)
    former.elapse(1.0)
    former.arrive(0, 0.0)
    assert waits == [0.004, 0.008, 0.01]
    assert former.deadline_s == pytest.approx(0.009)


def test_a_departure_closes_a_group_that_waited_for_it() -> None:
    former = GroupFormer(range(3), GroupRules(connect_every=1))
    for worker in range(3):
        former.arrive(worker, 0.0)
        former.elapse(0.5)
    assert former.arrive(0, 1.0) == []
    assert former.arrive(1, 1.0) == []
    assert former.deadline_s is None
    (group,) = former.leave(2, 5.0)
    assert group.members == (0, 1)
    assert group.connects


def test_nobody_waits_when_all_are_here() -> None:
    former = GroupFormer(range(3))
    assert former.arrive(2, 0.0) == former.arrive(0, 0.0) == []
    (group,) = former.arrive(1, 0.0)
    assert group.members == (0, 1, 2)


def test_iterations_are_taken_over_within_a_group() -> None:
    former = GroupFormer(range(3), GroupRules(first_wait_s=0.001, connect_every=99))
    for _ in range(4):
        former.arrive(0, 0.0)
        former.elapse(1.0)
    former.arrive(1, 2.0)
    former.arrive(0, 2.0)
    (group,) = former.elapse(3.0)
    assert group.iterations == (5, 1)
    assert [former.iteration(worker) for worker in range(3)] == [5, 5, 0]


def test_a_worker_may_come_with_several_steps() -> None:
    former = GroupFormer(range(2))
    former.arrive(0, 0.0, steps=4)
    (group,) = former.arrive(1, 0.0, steps=3)
    assert group.iterations == (4, 3)
    assert former.iteration(1) == 4


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"first_wait_s": 0.0}, "first_wait_s=0.0: with no time to wait"),
        ({"longest_wait_s": -1.0}, "longest_wait_s=-1.0"),
        ({"first_wait_s": 1.0}, "is not between"),
        ({"group_size": 1}, "group_size=1; give a number of 2 or more"),
        ({"connect_every": 0}, "connect_every=0"),
        ({"group_size": 2, "least": 3}, "groups could never be large enough"),
    ],
)
def test_rules_that_mean_nothing_are_refused(setting: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GroupRules(**setting)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.floats(0.05, 0.95))
def test_weights_are_shares_and_favour_the_fresh(iterations: list[int], alpha: float) -> None:
    found = weights(iterations, averaging="dynamic", alpha=alpha)
    assert math.fsum(found) == pytest.approx(1.0)
    assert all(weight > 0 for weight in found)
    assert weights(iterations, averaging="constant") == (1 / len(iterations),) * len(iterations)


def test_dynamic_weights_by_hand() -> None:
    # slots 1..3 with alpha 1/2: 1/7, 2/7, 4/7; nobody at 2, which goes to the stalest
    assert weights([5, 7, 7], averaging="dynamic", alpha=0.5) == pytest.approx((3 / 7, 2 / 7, 2 / 7))
    assert weights([1, 2, 3], averaging="dynamic", alpha=0.5) == pytest.approx((1 / 7, 2 / 7, 4 / 7))


def test_matchings_agree_and_change() -> None:
    first, second = matchings(range(6), seed=3), matchings(range(6), seed=3)
    steps = [next(first) for _ in range(20)]
    assert steps == [next(second) for _ in range(20)]
    for partners in steps:
        assert all(partners[partners[worker]] == worker != partners[worker] for worker in range(6))
    assert any(one != other for one, other in pairwise(steps))
    with pytest.raises(ConfigError, match="there are 5; take an even number"):
        next(matchings(range(5)))


def test_nobody_runs_ahead_of_a_worker_that_comes_late_after_a_reunion() -> None:
    """An epoch has ended for all, and worker 1 is still loading its first batch of the next one."""
    clocks, former = WaveClocks(range(2), distance=1), GroupFormer(range(2), GroupRules(first_wait_s=0.002))
    for worker in range(2):
        clocks.leave(worker)
        former.leave(worker, 0.0)
    clocks.reunited([0, 1])
    former.reunited([0, 1])
    clocks.join(0)
    former.join(0)
    assert clocks.tick(0) == [0]
    assert clocks.tick(0) == []
    assert clocks.tick(1) == [0, 1]
    assert former.arrive(0, 1.0) == []
    assert [group.members for group in former.arrive(1, 1.001)] == [(0, 1)]


@given(st.integers(0, 3), st.lists(st.tuples(st.sampled_from("tttttlj"), st.integers(0, 4)), max_size=200))
def test_clocks_stay_within_the_distance(distance: int, events: list[tuple[str, int]]) -> None:
    clocks = WaveClocks(range(5), distance=distance)
    waiting: set[int] = set()
    ticked: Counter[int] = Counter()
    for kind, worker in events:
        if kind == "t" and worker in clocks.clocks and worker not in waiting:
            waiting.add(worker)
            ticked[worker] += 1
            waiting -= set(clocks.tick(worker))
        elif kind == "l" and len(clocks.clocks) > 1:
            waiting.discard(worker)
            waiting -= set(clocks.leave(worker))
        elif kind == "j":
            clocks.join(worker)
        moving = set(clocks.clocks) - waiting
        assert moving, "everyone waits"
        assert all(clocks.clocks[worker] - clocks.least <= distance for worker in moving)
        assert all(clocks.clocks[worker] - clocks.least > distance for worker in waiting)
