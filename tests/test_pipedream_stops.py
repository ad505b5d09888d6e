"""Training that is told to stop in the middle of an epoch, on one rank: all stop after one and the same batch."""

from typing import Any

import pytest
from lightning_checks import assert_late_script, assert_same_script
from pipedream_farm import Farm, Order
from test_pipedream_lightning import ASYNCHRONOUS, SYNCHRONOUS, script

pytest_plugins = "pipedream_plugin"

LONG = {"max_epochs": 4}
BY_LOSS = script(seed=6, callbacks=[["StopsByLoss", {"limit": 0.85}]], trainer={"max_epochs": 12})
ON_RANK_0 = script(seed=2, callbacks=[["StopsAt", {"step": 6, "rank": 0}]], trainer=LONG, scheduler="step")
EVERYWHERE = script(seed=3, callbacks=[["StopsAt", {"step": 7}]], trainer=LONG)
IN_STEP = script(seed=4, model="StopsInStep", trainer={**LONG, "val_check_interval": 2})
STOP = "`trainer.should_stop` in the middle of an epoch, set on rank 0 alone (asynchronous: some batches later)"


def stopping(mode: str) -> Any:
    return pytest.mark.feature(STOP, group="stopping", mode=mode)


@stopping(SYNCHRONOUS)
@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pytest.param(BY_LOSS, BY_LOSS.over(3, strategy={"schedule": "1f1b"}), id="by-loss"),
        pytest.param(ON_RANK_0, ON_RANK_0.over(2, strategy={"schedule": "gpipe"}), id="rank-0"),
        pytest.param(IN_STEP, IN_STEP.over(2, strategy={"schedule": "1f1b"}), id="in-step"),
    ],
)
def test_a_synchronous_pipeline_stops_where_one_process_does(farm: Farm, single: Order, pipeline: Order) -> None:
    expected = farm.start(single).outcome[0]
    assert expected["steps"] % 5, "the case must stop within an epoch"
    assert_same_script(expected, farm.start(pipeline).outcome)


@pytest.mark.usefixtures("one_thread")
@stopping(ASYNCHRONOUS)
@pytest.mark.parametrize(
    ("single", "pipeline", "extra"),
    [
        pytest.param(ON_RANK_0, ON_RANK_0.over(3, split=True, strategy={"schedule": "pipedream"}), 2, id="rank-0"),
        pytest.param(
            ON_RANK_0, ON_RANK_0.over(3, split=True, strategy={"schedule": "pipedream_2bw"}), 1, id="rank-0-2bw"
        ),
        pytest.param(EVERYWHERE, EVERYWHERE.over(2, split=True, strategy={"schedule": "pipedream"}), 1, id="all"),
        pytest.param(
            IN_STEP, IN_STEP.over(3, split=True, strategy={"schedule": "pipedream"}), 0, id="validation-first"
        ),
    ],
)
def test_a_late_pipeline_stops_as_many_batches_later_as_are_in_flight(
    farm: Farm, single: Order, pipeline: Order, extra: int
) -> None:
    """No later than that, and at once where it is drained before."""
    expected, ranks = farm.start(single).outcome[0], farm.start(pipeline).outcome
    assert_late_script(expected, ranks, pipeline, exact=True, batches=len(expected["batches_seen"]) + extra)


TIMED = script(
    seed=5,
    callbacks=[["CountsBroadcasts", {}]],
    trainer={"max_epochs": 1, "max_time": 0.5},
    data_options={"samples": 99999},
)


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            TIMED.over(ranks, strategy={"schedule": schedule}),
            id=schedule,
            marks=pytest.mark.feature("`max_time`, Timer", group="stopping", mode=mode),
        )
        for ranks, schedule, mode in ((2, "1f1b", SYNCHRONOUS), (3, "pipedream", ASYNCHRONOUS))
    ],
)
def test_all_ranks_stop_when_time_is_up(farm: Farm, pipeline: Order) -> None:
    """After the same batch, though none asks another for it."""
    ranks = farm.start(pipeline).outcome
    assert 0 < ranks[0]["steps"] < 24000
    assert {found["steps"] for found in ranks} == {ranks[0]["steps"]}
    assert [found["broadcasts"] for found in ranks] == [0] * pipeline.ranks
