"""Every rule over real processes, against its written reference: the recorded order of groups is replayed."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pipedream_farm import Farm, Order
from uneven_reference import (
    Workers,
    flat,
    make_model,
    replay_events,
    replay_groups,
    replay_matchings,
    replay_sma,
    replay_waves,
)

from pl_pipe.comm import CommunicationError
from pl_pipe.comm.synchronizers import ADPSGD, Event, Pace, PairAveraging, Reunion, Worker
from pl_pipe.grouping import weights

pytest_plugins = "pipedream_plugin"

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def order(steps: list[int], *, seed: int = 0, slow: list[float] | None = None, **settings: Any) -> Order:
    return Order("uneven_tasks.rule", ranks=len(steps), settings=settings, steps=steps, seed=seed, slow=slow)


def assert_united(found: list[dict[str, Any]]) -> None:
    mean = torch.stack([notes["settled"] for notes in found]).mean(0)
    for notes in found:
        torch.testing.assert_close(notes["united"], mean, **TIGHT)
        assert torch.equal(notes["united"], found[0]["united"])
        assert torch.equal(notes["momentum"], found[0]["momentum"])


PARTIAL = [
    pytest.param(order([12, 9, 15], synchronizer="partial_reduce", connect_every=2), "constant", 0, id="constant"),
    pytest.param(
        order([10, 22, 16, 7], seed=3, synchronizer="partial_reduce", averaging="dynamic", alpha=0.6, group_size=2),
        "dynamic",
        3,
        id="dynamic",
    ),
    pytest.param(
        order(
            [13, 20, 17],
            seed=9,
            synchronizer="partial_reduce",
            averaging="dynamic",
            alpha=0.6,
            every=3,
            connect_every=1,
        ),
        "dynamic",
        9,
        id="every-third",
    ),
]


@pytest.mark.parametrize(("order", "averaging", "seed"), PARTIAL)
def test_partial_reduce_is_its_reference(farm: Farm, order: Order, averaging: str, seed: int) -> None:
    found = farm.start(order).outcome
    groups, every = found[0]["groups"], order.options["settings"].get("every", 1)
    workers, steps = Workers(len(found), seed), order.options["steps"]
    traces = replay_groups(
        workers, groups, lambda group: weights(group.iterations, averaging=averaging, alpha=0.6), steps=steps,
        every=every,
    )  # fmt: skip
    for rank, notes in enumerate(found):
        assert len(notes["trace"]) == len(traces[rank]) == steps[rank]
        for ours, theirs in zip(notes["trace"], traces[rank], strict=True):
            torch.testing.assert_close(ours, theirs, **TIGHT)
        assert [facts is None for facts in notes["facts"]] == [(n + 1) % every > 0 for n in range(steps[rank])]
        assert all(rank in facts.members for facts in notes["facts"] if facts is not None)
    assert any(len(group.members) > 1 for group in groups)
    assert all(iteration % every == 0 for group in groups for iteration in group.iterations), "they count steps"
    assert_united(found)


ASYNCHRONOUS = [
    pytest.param(order([12, 20, 15], synchronizer="ad_psgd"), 0, id="three"),
    pytest.param(order([25, 25], seed=2, slow=[0.0, 0.0], synchronizer="ad_psgd"), 2, id="two"),
    pytest.param(order([14, 25, 17], seed=3, synchronizer="ad_psgd", every=4), 3, id="every-fourth"),
]


@pytest.mark.parametrize(("order", "seed"), ASYNCHRONOUS)
def test_ad_psgd_is_its_reference(farm: Farm, order: Order, seed: int) -> None:
    found = farm.start(order).outcome
    histories = {rank: [Event(*event) for event in notes["history"]] for rank, notes in enumerate(found)}
    x = replay_events(Workers(len(found), seed), histories)
    for rank, notes in enumerate(found):
        torch.testing.assert_close(notes["settled"], x[rank], **TIGHT)
        kinds = [event.kind for event in histories[rank]]
        assert kinds.count("update") == order.options["steps"][rank]
        assert kinds.count("look") == kinds.count("average") > 0
        begun = sum(event.kind == "look" and event.active for event in histories[rank])
        assert begun <= order.options["steps"][rank] // order.options["settings"].get("every", 1)
    assert_united(found)


def test_ad_psgd_averagings_of_one_worker_follow_each_other(farm: Farm) -> None:
    for parameter in ASYNCHRONOUS:
        for notes in farm.start(parameter.values[0]).outcome:
            looks = [tuple(event[1:]) for event in notes["history"] if event[0] == "look"]
            averages = [tuple(event[1:]) for event in notes["history"] if event[0] == "average"]
            assert looks == averages


class NoPeers:
    """There is a worker 1 to average with, and no way to it."""

    rank, ranks = 0, (0,)

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


def test_ad_psgd_begins_an_averaging_with_every_third_step() -> None:
    model, begun, steps = make_model(0), [], 0
    worker: Any = Worker(0, (0, 1), dict(model.named_parameters()), None, None, new_peers=NoPeers)  # type: ignore[arg-type]
    rule = ADPSGD(worker, every=3)
    vars(rule)["_average_with"] = lambda partner: begun.append(steps)
    for united in (False, False, False, True, False, False, False):
        steps += 1
        rule.begin_step()
        rule.leave()  # waits for the averaging
        rule.after_update()
        if united:
            rule.resume()
    rule.close()
    assert begun == [3, 7]


def test_ad_psgd_waits_for_no_averaging() -> None:
    """It takes as long as it takes; steps go on, and none begins another until it is over."""
    model, held, begun = make_model(0), threading.Event(), []
    worker: Any = Worker(0, (0, 1), dict(model.named_parameters()), None, None, new_peers=NoPeers)  # type: ignore[arg-type]
    rule = ADPSGD(worker)
    vars(rule)["_average_with"] = lambda partner: (begun.append(partner), held.wait(20))
    for _ in range(3):
        rule.begin_step()
        rule.after_update()
    assert begun == [1]
    held.set()
    rule.leave()
    rule.begin_step()
    rule.close()
    assert begun == [1, 1]


class Answering(PairAveraging):
    """Another worker keeps ones, and is asked at certain steps."""

    def __init__(self, worker: Any, *, every: int) -> None:
        super().__init__(worker, every=every)
        self.asked: list[int] = []
        self.steps = 0
        vars(self._service)["call"] = self._answer

    def _answer(self, partner: int, operation: int) -> torch.Tensor:
        self.asked.append(self.steps)
        return torch.ones_like(self._kept)

    def step(self) -> None:
        self.steps += 1
        self.before_update()
        self.after_update()


def test_pair_asks_every_third_step_and_keeps_every_one() -> None:
    """After a reunion it counts anew."""
    model = make_model(0)
    worker: Any = Worker(0, (0, 1), dict(model.named_parameters()), None, None, new_peers=NoPeers)  # type: ignore[arg-type]
    rule = Answering(worker, every=3)
    for step in range(7):
        torch.nn.init.constant_(next(model.parameters()), float(step))
        rule.step()
        assert torch.equal(rule.handle(1, 0, torch.empty(0)), flat(model))
    rule.resume()
    for _ in range(3):
        rule.step()
    rule.close()
    assert rule.asked == [3, 6, 10]


@given(every=st.integers(1, 6), updates=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_a_pace_meets_after_every_so_many_updates(every: int, updates: list[int]) -> None:
    """In every epoch anew: what is left of the one before does not count."""
    pace = Pace(every)
    for count in updates:
        met = []
        for number in range(1, count + 1):
            last = pace.is_last
            met.append(pace.updated())
            assert met[-1] == last == (number % every == 0)
        assert sum(met) == count // every
        assert pace.done == count % every
        pace.restart()
        assert pace.done == 0


def test_ad_psgd_keeps_what_callbacks_do_to_the_model() -> None:
    """x lies beside the model; weights that a callback clips between steps are clipped in x too."""
    model = make_model(0)
    worker: Any = Worker(0, (0,), dict(model.named_parameters()), None, None, new_peers=NoPeers)  # type: ignore[arg-type]
    history: list[Event] = []
    rule = ADPSGD(worker, history=history)

    def change(value: float) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)

    for value in (0.5, 0.25):
        rule.begin_step()
        change(3.0)
        rule.after_update()
        change(value)
    rule.begin_step()
    assert set(flat(model).tolist()) == {0.25}
    rule.begin_step()  # of a step that was skipped
    rule.after_update()
    rule.leave()
    rule.settle()
    rule.close()
    assert set(flat(model).tolist()) == {0.25}
    kinds = [event.kind for event in history]
    assert kinds == ["load", "update", "change", "load", "update", "change", "load", "load", "update"]


class Meetings:
    """A client of worker 0, and what another one brings to each meeting; None is a worker that has died."""

    def __init__(self, *others: Any, other: int = 1) -> None:
        self.worker, self._other, self._others = 0, other, list(others)

    def meet(self, content: Any = None, about: str = "") -> dict[int, Any]:
        theirs = self._others.pop(0)
        return {0: content} if theirs is None else {0: content, self._other: theirs}


class Counting(torch.optim.SGD):
    """Counts its steps as some do: in a number that is no tensor."""

    def count(self, steps: int) -> "Counting":
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": steps}
        return self


def test_counts_that_are_no_tensors_are_brought_together() -> None:
    optimizer = Counting([torch.zeros(2, requires_grad=True)], lr=0.1).count(3)
    Reunion(Meetings([("step", "int")], [5]), None).optimizer(optimizer)  # type: ignore[arg-type]
    assert [state["step"] for state in optimizer.state.values()] == [5]


def test_states_are_alike_though_the_fullest_worker_dies() -> None:
    """It was to give worker 0 its state, and died before it could."""
    optimizer = Counting([torch.zeros(2, requires_grad=True)], lr=0.1)
    client: Any = Meetings([("step", "int")], None, None, None)
    Reunion(client, None).optimizer(optimizer)  # type: ignore[arg-type]
    assert not optimizer.state


def test_states_that_stay_different_are_refused() -> None:
    optimizer = Counting([torch.zeros(2, requires_grad=True)], lr=0.1).count(3)
    client: Any = Meetings(*[[("other", "int")], {}] * 10)
    with pytest.raises(CommunicationError, match="the states of Counting differ among the workers"):
        Reunion(client, None).optimizer(optimizer)  # type: ignore[arg-type]


def test_counts_in_tensors_of_whole_numbers_are_the_furthest_workers() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"step": torch.tensor(3)}
    client: Any = Meetings([(0, "step", ())], [torch.tensor(5)], [])
    Reunion(client, None).optimizer(optimizer)  # type: ignore[arg-type]
    assert optimizer.state[parameter]["step"].item() == 5


class Losing:
    """An exchange in which somebody is lost every time."""

    def average(self, buffer: torch.Tensor, members: list[int], shares: list[float], number: int) -> set[int]:
        return {1}


def test_averaging_that_never_succeeds_is_an_error() -> None:
    client: Any = Meetings(*[True] * 20)
    with pytest.raises(CommunicationError, match="workers were lost in each of 10 attempts"):
        Reunion(client, Losing()).average([torch.zeros(2)])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "every"),
    [
        (order([9] * 4, seed=1, synchronizer="ad_psgd", matching=True), 1),
        (order([9] * 4, seed=1, synchronizer="ad_psgd", matching=True, every=2), 2),
    ],
)
def test_matched_pairs_are_their_reference(farm: Farm, order: Order, every: int) -> None:
    found = farm.start(order).outcome
    for notes, values in zip(found, replay_matchings(Workers(4, 1), 9, 0, every=every), strict=True):
        torch.testing.assert_close(notes["trace"][-1], values, **TIGHT)
    assert_united(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "every"),
    [
        (order([7] * 3, seed=4, synchronizer="sma", pull=0.3), 1),
        (order([8] * 3, seed=4, synchronizer="sma", pull=0.3, every=3), 3),
    ],
)
def test_model_averaging_is_its_reference(farm: Farm, order: Order, every: int) -> None:
    found = farm.start(order).outcome
    steps = order.options["steps"][0]
    for notes, values in zip(found, replay_sma(Workers(3, 4), steps, 0.3, every=every), strict=True):
        torch.testing.assert_close(notes["trace"][-1], values, **TIGHT)
    assert_united(found)


@pytest.mark.parametrize("order", [order([8] * 3, seed=5, synchronizer="allreduce")])
def test_allreduce_is_the_mean_gradient(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    workers = Workers(3, 5)
    for _ in range(8):
        for rank in range(3):
            workers.gradient(rank)
        for parameters in zip(*(model.parameters() for model in workers.models), strict=True):
            mean = sum(p.grad for p in parameters) / 3
            for p in parameters:
                p.grad = mean.clone()
        for rank in range(3):
            workers.update(rank)
    for rank, notes in enumerate(found):
        torch.testing.assert_close(notes["trace"][-1], flat(workers.models[rank]), **TIGHT)
    assert_united(found)


@pytest.mark.slow
@pytest.mark.parametrize("order", [order([8] * 3, seed=6, slow=[0.2] * 3, synchronizer="wave", wave=2, servers=2)])
def test_waves_without_distance_are_rounds(farm: Farm, order: Order) -> None:
    """As long as nobody hands in the next wave before the others have taken this one: a step is long beside that."""
    found = farm.start(order).outcome
    server = replay_waves(Workers(3, 6), [0, 1, 2] * 4, 2)
    for notes in found:
        torch.testing.assert_close(notes["settled"], server, **TIGHT)
    assert found[0]["widest"] == 0
    assert_united(found)


UNEVEN_WAVES = order([9, 31, 20], seed=7, slow=[0.004, 0.0, 0.0], synchronizer="wave", wave=2, distance=2)


@pytest.mark.parametrize("order", [UNEVEN_WAVES])
def test_waves_keep_their_distance(farm: Farm, order: Order) -> None:
    """The fast end in the middle of a wave; none was ever further ahead, and all hand in what they have."""
    found = farm.start(order).outcome
    assert 0 < found[0]["widest"] <= 2
    for notes in found:
        torch.testing.assert_close(notes["settled"], found[0]["settled"], **TIGHT)
        assert max(facts.staleness for facts in notes["facts"] if facts is not None) <= 2
    assert_united(found)


@pytest.mark.parametrize(
    "order", [order([15, 9, 12], seed=8, synchronizer="pair"), order([5, 9], synchronizer="local")]
)
def test_pairs_and_loners_are_united_in_the_end(farm: Farm, order: Order) -> None:
    assert_united(farm.start(order).outcome)


@pytest.mark.slow
@pytest.mark.parametrize("order", [order([1, 1], slow=[0.0, 0.0], synchronizer="pair")])
def test_a_first_pair_is_averaged_with_what_the_other_kept(farm: Farm, order: Order) -> None:
    """Both begin alike, and keep either the beginning or their first step for each other."""
    found = farm.start(order).outcome
    workers = Workers(2, 0)
    start = workers.values()[0]
    for rank, notes in enumerate(found):
        alone = Workers(2, 0)
        alone.step(rank)
        other = Workers(2, 0)
        other.step(1 - rank)
        update = flat(alone.models[rank]) - start
        options = [start + update, (start + flat(other.models[1 - rank])) / 2 + update]
        assert any(torch.allclose(notes["trace"][0], option, **TIGHT) for option in options)
