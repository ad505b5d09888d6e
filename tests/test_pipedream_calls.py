"""fit, validate, test and predict one after the other, as scripts do; what every rank knows afterwards."""

import json
from typing import Any

import pytest
import torch
from lightning_checks import assert_like
from pipedream_farm import Farm, Order
from test_pipedream_lightning import ASYNCHRONOUS, SYNCHRONOUS, script
from test_pipedream_synchronous import assert_metrics, assert_same_run, assert_weights

pytest_plugins = "pipedream_plugin"

SCRIPT = Order(calls=["fit", "validate", "test", "predict"], trainer={"max_epochs": 1})
TWICE = Order(calls=["fit", "validate", "fit"], trainer={"max_epochs": 1}, scheduler="step", seed=1)
VALIDATE = Order(calls=["validate"], seed=2)
PREDICT = Order(calls=["predict"], seed=3)


def pair(single: Order, ranks: int, **strategy: Any) -> Any:
    name = "+".join(single.options["calls"])
    return pytest.param(single, single.over(ranks, strategy=strategy or None), id=f"{name}-{ranks}")


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pair(SCRIPT, 3, schedule="1f1b"),
        pair(VALIDATE, 3),
        pair(PREDICT, 4),
    ],
)
def test_every_call_answers_as_in_a_single_process(farm: Farm, single: Order, pipeline: Order) -> None:
    expected, ranks = farm.start(single).outcome[0], farm.start(pipeline).outcome
    calls = single.options["calls"]
    for rank, found in enumerate(ranks):
        for call in set(calls) & {"validate", "test"}:
            assert_metrics(found[call], expected[call], f"rank {rank}")
        assert_weights(found["weights"], expected["weights"])
        assert_metrics([found["metrics"]], [expected["metrics"]], f"rank {rank}")
    if "predict" in calls:
        for found in ranks:
            assert_predictions(found["predictions"], expected["predictions"])


def assert_predictions(found: list[Any], expected: list[Any]) -> None:
    """Batch by batch, in the loader's order."""
    assert [len(batch["classes"]) for batch in found] == [4, 3]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours["classes"], theirs["classes"])
        torch.testing.assert_close(ours["logits"], theirs["logits"], atol=2e-6, rtol=1e-5)
    assert len(torch.cat([batch["logits"] for batch in found]).unique(dim=0)) == 7


@pytest.mark.parametrize(("single", "pipeline"), [pair(TWICE, 2, schedule="1f1b")])
def test_a_second_fit_goes_on_where_the_first_ended(farm: Farm, single: Order, pipeline: Order) -> None:
    expected, ranks = farm.start(single).outcome[0], farm.start(pipeline).outcome
    assert len(expected["losses"]) == 10
    assert_same_run(expected, ranks)


@pytest.mark.parametrize(
    "pipeline",
    [
        Order(ranks=2, calls=["fit", "validate", "fit", "predict"], strategy={}, trainer={"max_epochs": 1}),
        Order(ranks=3, calls=["fit", "test"], strategy={"schedule": "pipedream_2bw"}),
    ],
    ids=["pipedream-2", "2bw-3"],
)
def test_every_rank_knows_the_same_afterwards(farm: Farm, pipeline: Order) -> None:
    """Metrics that an early stage computed, that hooks logged, of steps and of epochs; and the whole model."""
    first, *others = farm.start(pipeline).outcome
    logged = {"train_loss", "train_loss_step", "train_loss_epoch", "early_mean", "early_max", "batches_mean"}
    assert logged | {"epoch_squared", "val_loss", "val_acc", "val_hook"} <= first["after_fit"].keys()
    epochs = 2
    assert first["after_fit"]["epoch_squared"] == (epochs - 1) ** 2
    assert first["after_fit"]["val_hook"] == epochs
    assert first["after_fit"]["batches_mean"] == pytest.approx(sum(i * n for i, n in enumerate([4, 4, 4, 4, 2])) / 18)
    for found in others:
        assert found["after_fit"] == first["after_fit"]
        assert found["logged"] == first["logged"]
        assert found["metrics"] == first["metrics"]
        assert_weights(found["weights"], first["weights"])
        assert not any(value.is_meta for value in found["weights"].values())
        assert found.get("validate") == first.get("validate")


WRITTEN = script(calls=["fit", "predict"], seed=4, trainer={"max_epochs": 1}, callbacks=[["Writes", {}]])


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pytest.param(
            WRITTEN,
            WRITTEN.over(3, strategy={"schedule": "1f1b"}),
            id="3",
            marks=[
                pytest.mark.feature("BasePredictionWriter (called on rank 0)", group="calls", mode=mode)
                for mode in (SYNCHRONOUS, ASYNCHRONOUS)  # prediction knows no schedule
            ],
        )
    ],
)
def test_predictions_are_written_once(farm: Farm, single: Order, pipeline: Order) -> None:
    """By the rank that has them; the others have no file with nothing in it."""
    plain, job = farm.start(single), farm.start(pipeline)
    assert plain.outcome
    assert job.outcome
    assert [file.name for file in sorted(job.folder.glob("predictions_*"))] == ["predictions_0.json"]
    expected, found = (json.loads((one.folder / "predictions_0.json").read_text()) for one in (plain, job))
    assert len(expected["batches"]) == len(expected["epoch"]) == 2
    assert_like(found, expected, "predictions")
