"""Ranks whose stage takes nothing of the batch load nothing, and nothing else changes."""

import math
from typing import Any

import pytest
from pipedream_farm import Farm, Job, Order
from test_pipedream_synchronous import assert_metrics, assert_weights

pytest_plugins = "pipedream_plugin"

NEEDED = {"load_data": "needed"}
DATA = {"kind": "counted", "samples": 18, "shuffle": True}
"""The last batch of an epoch has two samples."""
PLAIN = Order(data=DATA, trainer={"num_sanity_val_steps": 1})
METRICS = Order(model="CalledMetric", data=DATA, seed=1)
WORKERS = Order(data={**DATA, "workers": 1}, trainer={"max_epochs": 2}, seed=2)
USES = Order(model="Uses", data=DATA, seed=3)
ASKED = Order(data=DATA, scheduler="asked", seed=4)
"""Its scheduler asks how many batches there will be, before anybody knows who loads."""


def over(name: str, single: Order, ranks: int, schedule: str, **strategy: Any) -> Any:
    """The run that loads as little as it needs, the one in which all load, and a single process's."""
    everyone = single.over(ranks, strategy={"schedule": schedule, **strategy}, split=True)
    needed = everyone.over(ranks, strategy={"schedule": schedule, **strategy, **NEEDED})
    return pytest.param(needed, everyone, single, id=f"{name}-{schedule}-{ranks}")


SYNCHRONOUS = [
    over("plain", PLAIN, 3, "1f1b"),
    over("plain", PLAIN, 4, "gpipe"),
    over("replicas", PLAIN, 4, "1f1b", replicas=[1, 2, 1]),
    over("metrics", METRICS, 3, "1f1b"),
    over("asked", ASKED, 3, "1f1b"),
    over("workers", WORKERS, 3, "1f1b"),
    over("recomputed", PLAIN, 3, "1f1b", recompute=True),
]
ASYNCHRONOUS = [
    over("plain", PLAIN, 3, "pipedream"),
    over("replicas", PLAIN, 4, "pipedream", replicas=[1, 2, 1]),
    over("metrics", METRICS, 4, "pipedream"),
    over("uses", USES, 3, "pipedream"),
    over("uses", USES, 4, "1f1b", num_microbatches=1),
]


def accesses(job: Job, rank: int) -> int:
    path = job.folder / f"loaded{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def assert_middle_loads_nothing(job: Job, found: list[dict[str, Any]]) -> None:
    last = max(rank["stage"] for rank in found)
    for rank, notes in enumerate(found):
        loads = notes["stage"] in (0, last)
        assert (accesses(job, rank) > 18) == loads, f"rank {rank} of stage {notes['stage']}"
        assert math.isnan(notes["batches_seen"][0]) != loads


@pytest.mark.parametrize(("needed", "everyone", "single"), [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_the_run_is_the_one_in_which_all_load(farm: Farm, needed: Order, everyone: Order, single: Order) -> None:
    job = farm.start(needed)
    found, expected = job.outcome, farm.start(everyone).outcome
    assert_middle_loads_nothing(job, found)
    assert found[0]["losses"] == expected[0]["losses"]
    assert len(found[0]["losses"]) == 10
    for ours, theirs in zip(found, expected, strict=True):
        assert_metrics(ours["validated"], theirs["validated"], "needed")
        assert_weights(ours["weights"], theirs["weights"])
        assert ours["steps"] == theirs["steps"]
        assert ours["drawn"] == theirs["drawn"], "what follows the fit draws on as if all had loaded"


@pytest.mark.parametrize(("needed", "everyone", "single"), SYNCHRONOUS)
def test_a_synchronous_run_is_the_single_one(farm: Farm, needed: Order, everyone: Order, single: Order) -> None:
    found, expected = farm.start(needed).outcome, farm.start(single).outcome[0]
    assert found[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6, rel=0)
    assert found[0]["batches_seen"] == expected["batches_seen"]
    assert_weights(found[1]["weights"], expected["weights"])


# --- who has to load ------------------------------------------------------------------------------------------------

FOUR = Order(ranks=4, data=DATA, validation=False, split=True, strategy={"schedule": "1f1b", **NEEDED})


@pytest.mark.parametrize(
    ("order", "loading"),
    [
        pytest.param(FOUR.over(4, model="InputAgain"), {0, 2, 3}, id="a skip from the input to the second stage"),
        pytest.param(FOUR.over(4, model="ReadsBatch"), {0, 1, 2, 3}, id="a number of the batch is read"),
        pytest.param(FOUR.over(4, model="Transfers"), {0, 1, 2, 3}, id="a hook works on the batch"),
        pytest.param(FOUR.over(4, calls=["validate"], validation=True), None, id="validate alone"),
    ],
)
def test_who_loads(farm: Farm, order: Order, loading: set[int] | None) -> None:
    """Rank 0 has the last stage, rank 3 the first."""
    job = farm.start(order)
    found = job.outcome
    if loading is None:
        assert [accesses(job, rank) > 0 for rank in range(4)].count(True) == 2
        return
    assert {rank for rank in range(4) if accesses(job, rank)} == loading
    everyone = farm.start(order.over(4, strategy={"schedule": "1f1b"})).outcome
    assert found[0]["losses"] == everyone[0]["losses"]


MANUAL = Order(ranks=2, model="Manual", data=DATA, split=True, strategy={"schedule": "1f1b", **NEEDED})


@pytest.mark.parametrize("order", [MANUAL])
def test_with_manual_optimization_all_load(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    assert len(job.outcome) == sum(accesses(job, rank) > 0 for rank in range(2))


# --- streams, further fits, prediction ------------------------------------------------------------------------------

STREAM = Order(ranks=3, data={"kind": "stream"}, validation=False, split=True, strategy={"schedule": "1f1b", **NEEDED})
AGAIN = Order(
    ranks=3, data=DATA, split=True, calls=["fit", "fit", "test", "predict"], strategy={"schedule": "1f1b", **NEEDED}
)


def test_a_loader_without_length_ends_everywhere(farm: Farm) -> None:
    found = farm.start(STREAM).outcome
    everyone = farm.start(STREAM.over(3, strategy={"schedule": "1f1b"})).outcome
    assert [math.isnan(rank["batches_seen"][0]) for rank in found] == [False, True, False]
    assert found[0]["losses"] == everyone[0]["losses"]
    assert {rank["steps"] for rank in found} == {everyone[0]["steps"]}


@pytest.mark.slow
def test_further_fits_go_on_alike(farm: Farm) -> None:
    found, expected = farm.start(AGAIN).outcome, farm.start(AGAIN.over(3, strategy={"schedule": "1f1b"})).outcome
    assert found[0]["losses"] == expected[0]["losses"]
    assert found[0]["test"] == expected[0]["test"]
    assert [rank["drawn"] for rank in found] == [rank["drawn"] for rank in expected]
    for ours, theirs in zip(found[0]["predictions"], expected[0]["predictions"], strict=True):
        assert ours["logits"].equal(theirs["logits"])


@pytest.mark.slow
def test_a_rank_without_a_stage_loads_nothing(farm: Farm) -> None:
    """Three modules on four ranks, planned without split points."""
    order = Order(ranks=4, model="Bare", data=DATA, validation=False, strategy={"schedule": "1f1b", **NEEDED})
    job = farm.start(order)
    found = job.outcome
    assert found[3]["stage"] == -1
    assert [accesses(job, rank) > 0 for rank in range(4)] == [True, False, True, False]
    assert found[0]["losses"] == farm.start(order.over(4, strategy={"schedule": "1f1b"})).outcome[0]["losses"]


def test_a_run_goes_on_from_a_checkpoint(farm: Farm) -> None:
    kept = {"data": DATA, "split": True, "checkpoint": {"save_last": True}, "strategy": NEEDED}
    saved = farm.start(Order(ranks=3, **kept, trainer={"max_epochs": 1})).outcome[0]["last_path"]
    job = farm.start(Order(ranks=3, **kept, ckpt_path=saved))
    everyone = farm.start(Order(ranks=3, **{**kept, "strategy": {}}, ckpt_path=saved)).outcome
    assert job.outcome[0]["losses"] == everyone[0]["losses"]
    assert len(everyone[0]["losses"]) == 5
    assert not accesses(job, 1)


# --- what must not be silent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "what"), [("InputAgainLater", "add"), ("ReadsLater", "item")])
def test_a_later_batch_that_needs_more_is_an_error_with_the_remedy(farm: Farm, model: str, what: str) -> None:
    errors = farm.start(FOUR.over(4, model=model)).errors
    blamed = [error for error in errors if "needs numbers of the batch" in error]
    assert blamed
    assert all("set load_data=all" in error for error in blamed)
    assert any(f": {what} needs numbers" in error for error in blamed)


def test_the_death_of_the_rank_that_loads_ends_the_others(farm: Farm) -> None:
    struck = {"rank": 2, "how": "SIGKILL"}
    job = farm.start(Order(ranks=3, lost=[2], split=True, strike=struck, strategy={"schedule": "1f1b", **NEEDED}))
    assert all("rank 2 (stage 0) is gone" in error for error in job.errors)
