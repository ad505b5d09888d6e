"""`1f1b` and `gpipe` inside Lightning: over processes, everything that can be observed equals the single run."""

from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order

pytest_plugins = "pipedream_plugin"

LOSS = 1e-6
SMALL_STEPS = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}
SMALL_VALUES = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
BEST = {"monitor": "val_loss", "mode": "min"}

MOMENTUM = Order(optimizer="momentum", scheduler="step", trainer=SMALL_STEPS, checkpoint=BEST)
ADAMW = Order(optimizer="adamw", scheduler="epoch", trainer=SMALL_VALUES, seed=1)
PLATEAU = Order(
    scheduler="plateau",
    seed=2,
    trainer={"max_epochs": 5, "num_sanity_val_steps": 2},
    early={"monitor": "val_acc", "mode": "max", "patience": 1},
    checkpoint={"monitor": "val_acc", "mode": "max"},
)
ACCUMULATED = Order(trainer={"accumulate_grad_batches": 2}, scheduler="step", seed=3)
ACCUMULATED_ADAMW = Order(
    optimizer="adamw", trainer={"accumulate_grad_batches": 2, **SMALL_STEPS}, validation=False, seed=4
)
BFLOAT = Order(trainer={"precision": "bf16-mixed", "max_epochs": 1}, seed=5)
SHUFFLED = Order(data={"shuffle": True}, trainer={"num_sanity_val_steps": 2}, seed=6)
AUGMENTED = Order(model="Autoencoder", data={"kind": "augmented", "shuffle": True}, validation=False, seed=7)
MID_EPOCH = Order(trainer={"val_check_interval": 2}, scheduler="step", seed=8, checkpoint=BEST)
OWN_WEIGHTS = Order(seed=9, validation=False, trainer={"max_epochs": 1})
PLAIN = Order(seed=10, optimizer="adamw", validation=False)


def pair(name: str, single: Order, ranks: int, schedule: str, **options: Any) -> Any:
    settings = {"schedule": schedule, **options.pop("strategy", {})}
    pipeline = single.over(ranks, strategy=settings, **{"split": True, **options})
    return pytest.param(single, pipeline, id=f"{name}-{ranks}-{schedule}")


PAIRS = [
    pair("momentum-norm", MOMENTUM, 2, "1f1b"),
    pair("momentum-norm", MOMENTUM, 3, "gpipe"),
    pair("momentum-norm", MOMENTUM, 4, "1f1b"),  # its last batch has fewer samples than there are micro-batches
    pair("adamw-value", ADAMW, 3, "1f1b"),
    pair("plateau", PLATEAU, 2, "1f1b"),
    pair("accumulated", ACCUMULATED, 2, "1f1b"),
    pair("accumulated-adamw", ACCUMULATED_ADAMW, 3, "gpipe"),
    pair("bfloat16", BFLOAT, 2, "1f1b", strategy={"num_microbatches": 1}),  # a sum over parts rounds differently
    pair("shuffled", SHUFFLED, 2, "1f1b", split=False),
    pair("augmented", AUGMENTED, 3, "1f1b", split=False),
    pair("mid-epoch", MID_EPOCH, 2, "1f1b"),
    pair("planned-own-weights", OWN_WEIGHTS, 2, "1f1b", split=False, differ="weights"),
    pair("more-parts-than-samples", PLAIN, 2, "1f1b", strategy={"num_microbatches": 6}),
]


def assert_same_run(single: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Rank 0 saw the losses; everything else is the same on all ranks, and as it was in a single process."""
    assert len(single["losses"]) == len(ranks[0]["losses"]) > 4
    assert ranks[0]["losses"] == pytest.approx(single["losses"], abs=LOSS, rel=0)
    for rank, found in enumerate(ranks):
        where = f"rank {rank}"
        assert found["batches_seen"] == single["batches_seen"], where
        assert found["rates"] == pytest.approx(single["rates"], rel=1e-9), where
        assert (found["epoch"], found["steps"]) == (single["epoch"], single["steps"]), where
        assert_metrics(found["validated"], single["validated"], where)
        assert_metrics([found["after_fit"]], [single["after_fit"]], where)
        assert_weights(found["weights"], single["weights"])
        assert found["trained"] == single["trained"], where


def assert_metrics(found: list[dict[str, float]], expected: list[dict[str, float]], where: str) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, abs=2e-6, rel=2e-6), f"{name} on {where}"


def assert_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_synchronous_pipeline_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert_same_run(farm.start(single).outcome[0], ranks)
    for found in ranks:
        assert found["drained"]
        assert found["peak"] == 1
        assert found["own"]
        assert sorted(found["own"] + found["meta"]) == sorted(found["names"])  # the others' weights take no memory
        assert set(found["with_state"]) <= set(found["own"])
        assert "meta" not in found["state_on"]


@pytest.mark.parametrize(
    ("single", "pipeline"), [given for given in PAIRS if given.values[1].options.get("checkpoint")]
)
def test_the_same_checkpoint_is_best(farm: Farm, single: Order, pipeline: Order) -> None:
    expected = farm.start(single).outcome[0]
    for found in farm.start(pipeline).outcome:
        assert found["best"] == pytest.approx(expected["best"], abs=LOSS)
        assert found["best_path"].split("/")[-1] == expected["best_path"].split("/")[-1]


@pytest.mark.parametrize(("single", "pipeline"), [given for given in PAIRS if given.values[1].options.get("early")])
def test_all_ranks_stop_early_together(farm: Farm, single: Order, pipeline: Order) -> None:
    expected = farm.start(single).outcome[0]
    assert 0 < expected["stopped"] < 4, "the case must stop early"
    assert len(set(expected["rates"])) > 1, "the case must reach a plateau"
    assert [found["stopped"] for found in farm.start(pipeline).outcome] == [expected["stopped"]] * pipeline.ranks


def test_the_cases_do_what_they_are_named_for(farm: Farm) -> None:
    """Clipping, accumulation and augmentation must matter, or equal results would say nothing."""
    plain = farm.start(Order(optimizer="momentum", scheduler="step", validation=False)).outcome[0]
    clipped = farm.start(MOMENTUM).outcome[0]
    assert clipped["losses"][3] != pytest.approx(plain["losses"][3], abs=1e-4)
    accumulated = farm.start(ACCUMULATED).outcome[0]
    assert accumulated["steps"] == 6  # of ten batches
    augmented = farm.start(AUGMENTED).outcome[0]["batches_seen"]
    assert len(set(augmented)) == len(augmented)
