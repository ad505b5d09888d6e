"""Plans that depend on the links between the ranks, which are measured or told; all ranks decide alike."""

import pytest
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_same_run

pytest_plugins = "pipedream_plugin"

SINGLE = Order(optimizer="momentum", scheduler="step", trainer={"max_epochs": 1}, seed=3)


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [(SINGLE, SINGLE.over(3, strategy={"schedule": "1f1b", "cluster": "probe"}))],
    ids=["3"],
)
@pytest.mark.slow
def test_links_are_measured_between_the_ranks_of_the_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert_same_run(farm.start(single).outcome[0], ranks)
    (level,) = ranks[0]["plan"].cluster.levels
    assert level.members == 3
    assert level.latency_s > 0, "links that are taken for granted have none"
    assert all(found["plan"] == ranks[0]["plan"] for found in ranks)


@pytest.mark.parametrize(
    ("single", "chosen"),
    [
        (SINGLE, SINGLE.over(3, strategy={"chosen": True, "cluster": "cluster.json", **settings}, bandwidth=1e3))
        for settings in ({}, {"schedule": "gpipe", "num_microbatches": 1})
    ],
    ids=["pipedream", "gpipe"],
)
def test_auto_trains_on_one_device_where_links_are_slow(farm: Farm, single: Order, chosen: Order) -> None:
    """At a kilobyte a second nothing is worth sending: the run is a single process's, whatever the schedule."""
    job = farm.start(chosen)
    ranks = job.outcome
    assert_same_run(farm.start(single).outcome[0], ranks)
    assert {found["plan"].shape for found in ranks} == {"1"}
    log = (job.folder / "rank0.log").read_text()
    assert "strategy=auto chose one device" in log
    assert "the whole model on one rank" in log
