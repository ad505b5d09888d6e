"""Steps and hooks that change rates, closures, batches or ask the trainer: as in a single process, or refused by name.

Also of docs/support.md; the scripts are those of test_pipedream_lightning, with models of their own.
"""

import math
import time
from typing import Any

import pytest
from late_rule import late_run
from lightning_checks import assert_late_script, assert_like, assert_same_script
from pipedream_farm import Farm, Order
from test_pipedream_lightning import ASYNCHRONOUS, ONE_EPOCH, SYNCHRONOUS, script

from pl_pipe.errors import StageError
from pl_pipe.strategies.pipeline.hook_steps import HooksEnded

pytest_plugins = "pipedream_plugin"

SHORT: dict[str, Any] = {"trainer": ONE_EPOCH, "validation": None}
CASES: dict[str, tuple[Order, str, str]] = {
    "gathers": (
        script(model="Gathers", seed=30, trainer=ONE_EPOCH),
        "logging",
        "`self.all_gather`, which gives what it is given, as in a single process",
    ),
    "rate-in-step": (
        script(model="RateInStep", seed=31, **SHORT),
        "optimization",
        "a learning rate that the step sets for its own update",
    ),
    "rate-in-hook": (
        script(model="RateInHook", seed=32, **SHORT),
        "optimization",
        "a learning rate set in `on_before_optimizer_step`",
    ),
    "own-rate": (
        script(model="OwnRate", seed=33, **SHORT),
        "optimization",
        "an optimizer that changes its own settings",
    ),
    "every-second": (
        script(model="EverySecond", seed=34, **SHORT),
        "optimization",
        "an `optimizer_step` that runs the closure and makes no update",
    ),
    "closure-first": (
        script(model="ClosureFirst", seed=35, **SHORT),
        "optimization",
        "an `optimizer_step` that calls the closure itself",
    ),
    "adds-up": (
        script(model="AddsUp", seed=36, **SHORT),
        "optimization",
        "an `optimizer_zero_grad` that leaves gradients to add up",
    ),
    "cut-short": (
        script(model="Skips", seed=37, trainer={"accumulate_grad_batches": 2}, validation=None),
        "stopping",
        "`on_train_batch_start` that returns -1 while gradients accumulate",
    ),
    "asks-in-step": (
        script(model="AsksInStep", seed=38, shuffle=True, **SHORT),
        "optimization",
        "`trainer.estimated_stepping_batches` in a step",
    ),
    "asks-for-all": (
        script(model="AsksForAll", seed=39, shuffle=True, **SHORT),
        "optimization",
        "`trainer.estimated_stepping_batches` in `configure_optimizers`, for a step that asks for the optimizer",
    ),
    "asks-in-setup": (
        script(model="AsksInSetup", seed=42, shuffle=True, **SHORT),
        "optimization",
        "`trainer.estimated_stepping_batches` in `setup`",
    ),
    "meets-in-loader": (
        script(data="meeting", seed=43, trainer=ONE_EPOCH),
        "data",
        "a `train_dataloader` in which ranks wait for one another",
    ),
    "mixup": (
        script(callbacks=[["Mixup", {}]], seed=40, shuffle=True, **SHORT),
        "data",
        "a callback that changes the batch by chance in `on_train_batch_start`",
    ),
}


def cases(mode: str, over: dict[str, tuple[int, str]]) -> list[Any]:
    found = []
    for name, (ranks, schedule) in over.items():
        single, group, feature = CASES[name]
        pipeline = single.over(ranks, strategy={"schedule": schedule})
        mark = pytest.mark.feature(feature, group=group, mode=mode)
        found.append(pytest.param(single, pipeline, id=f"{name}-{ranks}-{schedule}", marks=mark))
    return found


IN_STEP = {name: (2 + number % 2, ("1f1b", "gpipe")[number % 2]) for number, name in enumerate(CASES)}
LATE = {
    "gathers": (3, "pipedream"),
    "asks-in-step": (2, "pipedream_2bw"),
    "asks-for-all": (2, "pipedream"),
    "asks-in-setup": (3, "pipedream"),
    "mixup": (3, "pipedream"),
}


@pytest.mark.parametrize(("single", "pipeline"), cases(SYNCHRONOUS, IN_STEP))
def test_a_synchronous_pipeline_runs_the_script_as_one_process(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_same_script(farm.start(single).outcome[0], farm.start(pipeline).outcome)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("single", "pipeline"), cases(ASYNCHRONOUS, LATE))
def test_a_late_pipeline_runs_the_script(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_late_script(farm.start(single).outcome[0], farm.start(pipeline).outcome, pipeline, exact=False)


ALONE = ("rate-in-hook", "own-rate", "every-second", "closure-first", "adds-up", "cut-short")


@pytest.mark.parametrize(
    ("single", "strategy"),
    [pytest.param(CASES[name][0], CASES[name][0].over(1, strategy={}), id=name) for name in ALONE],
)
def test_on_one_device_the_strategy_is_the_plain_run(farm: Farm, single: Order, strategy: Order) -> None:
    assert_same_script(farm.start(single).outcome[0], farm.start(strategy).outcome)


# --- updates that come late -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            CASES["rate-in-step"][0].over(ranks, strategy={"schedule": schedule}, split=True),
            id=f"{schedule}-{ranks}",
            marks=pytest.mark.feature(CASES["rate-in-step"][2], group="optimization", mode=ASYNCHRONOUS),
        )
        for ranks, schedule in ((3, "pipedream"), (2, "pipedream_2bw"))
    ],
)
def test_a_late_update_has_the_rate_that_its_own_step_set(farm: Farm, pipeline: Order) -> None:
    first = farm.start(pipeline).outcome[0]
    first["first_rates"] = [0.1 / (1 + batch) for batch in range(len(first["batches"]))]
    losses, weights = late_run(first, pipeline)
    assert first["losses"] == pytest.approx(losses, abs=2e-6, rel=0)
    assert_like({name: first["weights"][name] for name in weights}, weights, "weights")


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            CASES["rate-in-hook"][0].over(2, strategy={"schedule": "pipedream"}),
            marks=pytest.mark.feature(CASES["rate-in-hook"][2], group="optimization", mode=ASYNCHRONOUS),
        )
    ],
)
def test_a_rate_set_before_a_late_update_stays(farm: Farm, pipeline: Order) -> None:
    """The first stage's update comes a batch later, when the hook meets another step."""
    last, first = farm.start(pipeline).outcome
    assert last["rates"] == pytest.approx([0.02, 0.04, 0.06, 0.08, 0.08])
    assert first["rates"] == pytest.approx([0.2, 0.04, 0.06, 0.08, 0.08])


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            CASES[name][0].over(2, strategy={"schedule": schedule}),
            id=f"{name}-{schedule}",
            marks=pytest.mark.feature(CASES[name][2], group="optimization", mode=ASYNCHRONOUS, outcome="refused"),
        )
        for name, schedule in (("every-second", "pipedream"), ("closure-first", "pipedream_2bw"))
    ],
)
def test_a_late_update_cannot_be_left_out(farm: Farm, pipeline: Order) -> None:
    remedy = "call optimizer.step for every batch, or set schedule=1f1b"
    for error in farm.start(pipeline).errors:
        assert "ran its closure at batch" in error
        assert f"schedule={pipeline.options['strategy']['schedule']}" in error
        assert remedy in error


# --- numbers drawn in steps -----------------------------------------------------------------------------------------

MIXED = script(model="MixesInStep", seed=41, **SHORT)
DRAWS = "numpy and `random` in a step: all stages see the same numbers (not those of a single process)"


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(
            MIXED.over(ranks, strategy={"schedule": schedule, **strategy}),
            id=f"{schedule}-{ranks}-{'-'.join(strategy)}",
            marks=pytest.mark.feature(DRAWS, group="data", mode=mode),
        )
        for ranks, schedule, strategy, mode in (
            (2, "1f1b", {"num_microbatches": 1}, SYNCHRONOUS),
            (3, "1f1b", {"recompute": True}, SYNCHRONOUS),
            (3, "pipedream", {}, ASYNCHRONOUS),
            (3, "pipedream", {"replicas": [2, 1], "split_points": ["layers.1"]}, ASYNCHRONOUS),
        )
    ],
)
def test_python_draws_alike_on_all_ranks(farm: Farm, pipeline: Order) -> None:
    """A layer that draws runs on one rank alone."""
    assert_drawn_alike(farm.start(pipeline).outcome)


@pytest.mark.parametrize(
    "pipeline", [CASES["mixup"][0].over(3, strategy={"schedule": "1f1b", "load_data": "needed"}, split=True)]
)
def test_a_rank_that_loads_nothing_draws_as_the_others_in_hooks(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert [math.isnan(found["batches_seen"][0]) for found in ranks] == [False, True, False]
    assert_drawn_alike(ranks)


def assert_drawn_alike(ranks: list[dict[str, Any]]) -> None:
    drawn = [found["module"]["drawn"] for found in ranks]
    assert all(numbers == drawn[0] for numbers in drawn)
    assert len(set(drawn[0])) == len(drawn[0]) >= 5


def test_a_rank_that_comes_late_to_a_hook_takes_others_for_gone_after_it_has_waited_itself() -> None:
    ended, now_s = HooksEnded(lambda _: None), time.monotonic()
    with ended.during("on_train_epoch_end", 5):
        ended.hear(1, {"hook": 5})
        ended._ended[1] = 5, now_s - 60
        ended.look(1, now_s)
        with pytest.raises(StageError, match="needs numbers of rank 1 here"):
            ended.look(1, now_s - 60)
