"""PointNet, DCGAN and its discriminator under the strategies: the single run's losses where arithmetic is the same."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_metrics, assert_weights
from zoo_tasks import built

from pl_pipe.runtime.micro_batches import split

pytest_plugins = "pipedream_plugin"

TASK = "zoo_tasks.fit"
EXACT = {"num_microbatches": 1}  # batch norm's statistics of a part are not the batch's
POINTNET = Order(TASK, recipe="pointnet", settings={"dropout": 0.0})
PLAIN_POINTNET = Order(TASK, recipe="pointnet", settings={"dropout": 0.0, "feature_transform": False}, seed=1)
DISCRIMINATOR = Order(TASK, recipe="dcgan_d", seed=2)
DCGAN = Order(TASK, recipe="dcgan", seed=3)

PAIRS = [
    pytest.param(single, single.over(2, strategy={"schedule": schedule, **EXACT}), id=f"{name}-{schedule}", marks=marks)
    for name, single, schedule, marks in (
        ("pointnet", POINTNET, "1f1b", ()),
        ("plain-pointnet", PLAIN_POINTNET, "gpipe", pytest.mark.slow),
        ("dcgan_d", DISCRIMINATOR, "1f1b", pytest.mark.slow),
        ("dcgan_d", DISCRIMINATOR, "gpipe", ()),
    )
]


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_synchronous_pipeline_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    expected = farm.start(single).outcome[0]
    assert len(expected["losses"]) == 8  # 26 samples in batches of 8, twice
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], abs=1e-6, rel=0)
    for found in ranks:
        assert_metrics(found["validated"], expected["validated"], "any rank")
        assert_weights(found["weights"], expected["weights"])
        assert len(found["stages"].stages) == 2


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(Order(TASK, ranks=2, recipe="pointnet", epochs=3), marks=pytest.mark.slow),
        Order(TASK, ranks=2, recipe="dcgan_d", epochs=3),
    ],
    ids=["pointnet", "dcgan_d"],
)
def test_an_asynchronous_pipeline_learns(farm: Farm, order: Order) -> None:
    ranks = farm.start(order).outcome
    assert ranks[0]["finite"]
    assert_weights(ranks[1]["weights"], ranks[0]["weights"])
    assert sum(ranks[0]["losses"][-4:]) < sum(ranks[0]["losses"][:4])


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(POINTNET.over(2, strategy="ddp"), id="pointnet", marks=pytest.mark.slow),
        pytest.param(DISCRIMINATOR.over(2, strategy="ddp"), id="dcgan_d"),
    ],
)
def test_data_parallel_averages_the_gradients_of_its_ranks(farm: Farm, order: Order, one_thread: None) -> None:
    """Against two copies of the model in one process, whose gradients are averaged by hand."""
    ranks = farm.start(order).outcome
    L.seed_everything(order.options.get("seed", 0))
    model, _ = built(order.options["recipe"], **order.options.get("settings", {}))
    losses = averaged_training(model, ranks)
    for rank, expected in enumerate(losses):
        assert ranks[rank]["losses"] == pytest.approx(expected, abs=1e-6, rel=0)


@pytest.mark.parametrize(
    ("order", "losses"),
    [
        pytest.param(POINTNET.over(2, strategy={"schedule": "1f1b"}, epochs=1), 4, id="micro-batches"),
        pytest.param(
            POINTNET.over(2, strategy="ddp", settings={"samples": 34}, epochs=1), 2, id="ddp", marks=pytest.mark.slow
        ),
    ],
)
def test_batch_norm_never_meets_a_lone_sample(farm: Farm, order: Order, losses: int) -> None:
    """A last batch of 2 is not divided into two; of 17 samples a rank, in batches of 8, the last is left out."""
    ranks = farm.start(order).outcome
    assert ranks[0]["finite"]
    assert [rank["steps"] for rank in ranks] == [losses, losses]


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        pytest.param(single.over(2, strategy={"schedule": schedule, "plan": "auto"}), id=f"{name}-{schedule}")
        for name, single, schedule in (
            ("pointnet", POINTNET, "1f1b"),
            ("plain-pointnet", PLAIN_POINTNET, "gpipe"),
            ("dcgan_d", DISCRIMINATOR, "1f1b"),
        )
    ],
)
def test_whatever_the_planner_chooses_is_the_divided_batch(farm: Farm, order: Order, one_thread: None) -> None:
    """Batch norm sees micro-batches, under stages as under replicas: a single process that divides batches alike."""
    ranks = farm.start(order).outcome
    L.seed_everything(order.options.get("seed", 0))
    model, _ = built(order.options["recipe"], **order.options.get("settings", {}))
    plan = ranks[0]["stages"]
    expected = divided_training(model, ranks[0], parts=plan.round * len(plan.stages))
    assert len(expected) == 8
    assert ranks[0]["losses"] == pytest.approx(expected, abs=2e-6, rel=0)


def divided_training(model: Any, found: dict[str, Any], *, parts: int) -> list[float]:
    """The losses of one model that adds up the gradients of each batch's parts, two samples or more in each."""
    model.log = lambda *_, **__: None
    made = model.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    losses = []
    for number, batch in enumerate(zip(found["batches"], found["targets"], strict=True)):
        model.zero_grad()
        losses.append(0.0)
        for part in split(batch, parts, least=2):
            loss = part.share * model.training_step(part.content, number)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def averaged_training(model: Any, ranks: list[dict[str, Any]]) -> list[list[float]]:
    """The losses of each copy; all take the same update, each keeps its own statistics of batches."""
    copies = [model, *(copy.deepcopy(model) for _ in ranks[1:])]
    optimizers = []
    for each in copies:
        each.log = lambda *_, **__: None
        made = each.configure_optimizers()
        optimizers.append(made["optimizer"] if isinstance(made, dict) else made)
    losses: list[list[float]] = [[] for _ in ranks]
    for number in range(len(ranks[0]["losses"])):
        for rank, each in enumerate(copies):
            each.zero_grad()
            loss = each.training_step((ranks[rank]["batches"][number], ranks[rank]["targets"][number]), number)
            loss.backward()
            losses[rank].append(loss.item())
        for group in zip(*(each.parameters() for each in copies), strict=True):
            mean = torch.stack([parameter.grad for parameter in group]).mean(dim=0)
            for parameter in group:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return losses


@pytest.mark.parametrize(
    "order",
    [pytest.param(DCGAN, id="single", marks=pytest.mark.slow), pytest.param(DCGAN.over(2, strategy="ddp"), id="ddp")],
)
def test_dcgan_trains_both_networks_and_writes_images(farm: Farm, order: Order) -> None:
    ranks = farm.start(order).outcome
    for found in ranks:
        assert found["finite"]
        assert len(found["validated"]) == 2
    assert ranks[0]["images"] == ["epoch_000.png", "epoch_001.png"]
    for name, before in ranks[0]["initial"].items():
        assert not torch.equal(before, ranks[0]["weights"][name]), f"{name} was not trained"
    for found in ranks[1:]:
        trained = {name: value for name, value in found["weights"].items() if "running" not in name}
        assert_weights(trained, {name: ranks[0]["weights"][name] for name in trained})


@pytest.mark.parametrize("order", [DCGAN.over(2, strategy={})])
def test_dcgan_is_refused_by_a_pipeline(farm: Farm, order: Order) -> None:
    for error in farm.start(order).errors:
        assert "Dcgan sets automatic_optimization=False" in error
        assert "set schedule=1f1b" in error
