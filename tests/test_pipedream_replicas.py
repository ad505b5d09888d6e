"""Replicated stages inside Lightning, over processes: `1f1b` and `gpipe` equal the single run, `pipedream` its rule."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from late_rule import late_run
from pipedream_farm import Farm, Order
from pipedream_models import loader, make
from test_pipedream_synchronous import assert_same_run, assert_weights
from torch import Tensor

pytest_plugins = "pipedream_plugin"

RATES = {"momentum": 0.2, "adamw": 0.02}
DATA = {"samples": 33, "batch_size": 12}
"""The last batch of an epoch has 9 samples."""


def over(single: Order, replicas: Sequence[int], schedule: str, **options: Any) -> Any:
    settings = {"schedule": schedule, "replicas": list(replicas), **options.pop("strategy", {})}
    pipeline = single.over(sum(replicas), strategy=settings, split=True, **options)
    return pytest.param(single, pipeline, id=f"{'-'.join(map(str, replicas))}-{schedule}")


BEST = {"monitor": "val_loss", "mode": "min"}
MOMENTUM = Order(data=DATA, scheduler="step", checkpoint=BEST, trainer={"gradient_clip_val": 0.5})
ADAMW = Order(data={**DATA, "shuffle": True}, optimizer="adamw", trainer={"num_sanity_val_steps": 1}, seed=1)
METRICS = Order(model="CalledMetric", data=DATA, seed=2)
COLLECTED = Order(model="Collected", data=DATA, seed=6)
STEP_METRIC = Order(model="StepMetric", data={"samples": 36, "batch_size": 12}, seed=6)
ACCUMULATED = Order(data=DATA, trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, seed=3)
MID_EPOCH = Order(data=DATA, trainer={"val_check_interval": 2}, seed=4)
LOGS_AGAIN = Order(model="LogsAgain", data=DATA, seed=7)

PAIRS = [
    over(MOMENTUM, (3, 1), "1f1b"),
    over(MOMENTUM, (2, 2), "1f1b"),
    over(ADAMW, (2,), "gpipe"),
    over(ADAMW, (1, 2, 1), "1f1b", strategy={"num_microbatches": 12}),  # more than the last batch has samples
    over(ADAMW, (1, 2), "gpipe", strategy={"num_microbatches": 5}),
    over(METRICS, (1, 2), "1f1b"),
    over(METRICS, (2, 1, 1), "gpipe"),
    over(METRICS, (4,), "1f1b"),
    over(COLLECTED, (1, 2), "1f1b", strategy={"num_microbatches": 3}),
    over(COLLECTED, (3,), "gpipe"),
    over(STEP_METRIC, (1, 2), "1f1b"),
    over(ACCUMULATED, (2, 1), "1f1b"),
    over(MID_EPOCH, (1, 2), "1f1b"),
    over(LOGS_AGAIN, (1, 2), "1f1b"),
]


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_synchronous_plan_with_replicas_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert_same_run(farm.start(single).outcome[0], ranks)
    assert all(found["drained"] and found["peak"] == 1 for found in ranks)
    shape = pipeline.options["strategy"]["replicas"]
    stages = [found["stage"] for found in ranks]
    assert stages == [stage for stage in reversed(range(len(shape))) for _ in range(shape[stage])]


# --- pipedream ------------------------------------------------------------------------------------------------------


def order(replicas: Sequence[int], update: str = "round", *, accumulate: int = 1, **options: Any) -> Any:
    strategy = {"schedule": "pipedream", "replicas": list(replicas), "update": update, **options.pop("strategy", {})}
    trainer = {"accumulate_grad_batches": accumulate, **options.pop("trainer", {})}
    given = Order(
        ranks=sum(replicas), split=True, strategy=strategy, validation=False, trainer=trainer,
        **{"scheduler": "step", "optimizer": "momentum", "seed": sum(replicas), "data": {"samples": 40}, **options},
    )  # fmt: skip
    return pytest.param(given, id=f"{'-'.join(map(str, replicas))}-{update}-{accumulate}")


RULES = [
    order((2,)),
    order((4,), "minibatch"),
    order((3, 1)),
    order((3, 1), "minibatch"),
    order((2, 2), optimizer="adamw"),
    order((1, 2)),
    order((1, 2), "minibatch"),
    order((2, 1, 1)),
    order((1, 2, 1), "minibatch"),
    order((2, 1), accumulate=2),
    order((1, 1), accumulate=3),
]


def reference(found: dict[str, Any], of: Order, per_epoch: int) -> tuple[list[float], dict[str, Tensor]]:
    """The rule's losses and weights. The pipeline is drained after every epoch; Lightning asks the scheduler once in
    `accumulate` batches."""
    accumulate = of.options["trainer"]["accumulate_grad_batches"]
    rates, steps = [], 0
    for number in range(len(found["batches"])):
        rates.append(RATES[of.options["optimizer"]] / (1 + steps / 4))
        batch = number % per_epoch + 1
        steps += batch % accumulate == 0 or batch == per_epoch
    drained = range(0, len(rates), per_epoch)
    return late_run({"batches": found["batches"], "first_rates": rates, "segments": drained}, of)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("pipeline", RULES)
def test_pipedream_with_replicas_follows_its_rule(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    per_epoch = len(loader(**pipeline.options["data"]))
    losses, expected = reference(ranks[0], pipeline, per_epoch)
    assert len(losses) == 2 * per_epoch > 12
    assert ranks[0]["losses"] == pytest.approx(losses, abs=1e-6, rel=0)
    for found in ranks:
        assert_weights({name: found["weights"][name] for name in expected}, expected)
        assert found["batches_seen"] == ranks[0]["batches_seen"]
        assert found["after_fit"] == pytest.approx(ranks[0]["after_fit"])
    accumulate = pipeline.options["trainer"]["accumulate_grad_batches"]
    mean = accumulate * sum(losses[per_epoch:]) / per_epoch  # all batches have as many samples
    assert ranks[0]["after_fit"]["train_loss_epoch"] == pytest.approx(mean, abs=1e-6)


# --- What replicas have besides their weights ------------------------------------------------------------------------

NORMED = Order(
    ranks=3,
    model="Normed",
    data=DATA,
    validation=False,
    strategy={"schedule": "1f1b", "split_points": ["norm"], "replicas": [2, 1], "num_microbatches": 2},
    trainer={"max_epochs": 1, "limit_train_batches": 1},
    seed=5,
)


@pytest.mark.parametrize("pipeline", [NORMED])
def test_statistics_of_batch_norm_are_the_mean_of_the_replicas(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    model = make("Normed", seed=5)
    statistics = []
    for half in ranks[0]["batches"][0][0].tensor_split(2):
        norm = torch.nn.BatchNorm1d(8)
        norm(model.first(half))
        statistics.append(norm.running_mean)
    assert not torch.allclose(*statistics, atol=1e-3)
    for found in ranks:
        mean = sum(statistics) / 2
        torch.testing.assert_close(found["weights"]["norm.running_mean"], mean.detach(), atol=1e-6, rtol=1e-5)
        assert found["weights"]["norm.num_batches_tracked"] == 1


TALLIES = Order(
    ranks=3,
    model="Tallies",
    data=DATA,
    strategy={"schedule": "1f1b", "split_points": ["layers.1"], "replicas": [2, 1], "num_microbatches": 2},
    seed=5,
)


@pytest.mark.parametrize("pipeline", [TALLIES])
def test_another_buffer_that_differs_is_told_of_once(farm: Farm, pipeline: Order) -> None:
    """It becomes the first replica's, which the user may not expect; a buffer that nobody changes is not mentioned."""
    job = farm.start(pipeline)
    values = {float(found["weights"]["layers.0.samples"]) for found in job.outcome}
    assert len(values) == 1
    logs = [(job.folder / f"rank{rank}.log").read_text() for rank in range(3)]
    words = "buffer layers.0.samples of stage 0 differs among its 2 replicas"
    assert [log.count(words) for log in logs] == [0, 1, 0], "by the first replica of the stage"
    assert "layers.0.constant" not in "".join(logs)


@pytest.mark.parametrize("pipeline", [NORMED])
def test_batch_norms_are_not_told_of(farm: Farm, pipeline: Order) -> None:
    job = farm.start(pipeline)
    assert job.outcome
    assert "differs among" not in "".join((job.folder / f"rank{rank}.log").read_text() for rank in range(3))


AVERAGES = Order(
    model="Averages", validation=False, trainer={"max_epochs": 1}, checkpoint={"save_last": True}, split=True
)
PARTS = {"schedule": "1f1b", "num_microbatches": 2}


@pytest.mark.parametrize(
    ("straight", "replicated"),
    [(AVERAGES.over(2, strategy=PARTS), AVERAGES.over(3, strategy={**PARTS, "replicas": [2, 1]}))],
)
def test_a_buffer_that_moves_to_a_later_stage_leaves_all_replicas(
    farm: Farm, straight: Order, replicated: Order
) -> None:
    expected = farm.start(straight).outcome[0]["weights"]
    assert expected["average"] > 0.1
    for found in farm.start(replicated).outcome:
        assert_weights(found["weights"], expected)


@pytest.mark.parametrize("order", [AVERAGES.over(3, strategy={**PARTS, "replicas": [1, 2]})])
def test_a_buffer_that_moves_to_replicas_is_refused(farm: Farm, order: Order) -> None:
    """Each would have an average of its own batches, and the others' none."""
    for error in farm.start(order).errors:
        assert re.search("StageError: buffer average .*stage 1, which has several.*plan stage 1 onto one device", error)
