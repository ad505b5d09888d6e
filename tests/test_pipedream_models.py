"""Models as users write them: Lightning's demos, several calls in one step, shared and frozen weights, bare stages."""

import math
from typing import Any

import pytest
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_same_run, assert_weights

pytest_plugins = "pipedream_plugin"

DEMO = Order(model="Demo", data={"kind": "tokens", "samples": 18}, validation=False, trainer={"max_epochs": 1})
BORING = Order(model="DeepBoring", data={"kind": "boring"}, trainer={"max_epochs": 1})
AUTOENCODER = Order(model="Autoencoder", validation=False, trainer={"max_epochs": 1}, seed=1)
VAE = Order(model="QuietVae", validation=False, trainer={"max_epochs": 1}, seed=2)
EMBEDDING = Order(model="SharedEmbedding", data={"kind": "tokens"}, validation=False, trainer={"max_epochs": 1}, seed=3)
FROZEN = Order(model="Frozen", trainer={"max_epochs": 1}, seed=4)
BARE = Order(model="Bare", validation=False, trainer={"max_epochs": 1}, seed=5)
NORMED = Order(model="Normed", validation=False, data={"samples": 20}, trainer={"max_epochs": 1}, seed=6)
CALLED = Order(model="CalledMetric", trainer={"max_epochs": 1}, seed=7)


def pair(single: Order, ranks: int, schedule: str, *marks: Any, **strategy: Any) -> Any:
    pipeline = single.over(ranks, strategy={"schedule": schedule, **strategy})
    return pytest.param(single, pipeline, id=f"{single.options['model']}-{ranks}-{schedule}", marks=marks)


PAIRS = [
    pair(DEMO, 2, "1f1b"),
    pair(DEMO, 4, "gpipe"),
    pair(BORING, 3, "1f1b"),
    pair(AUTOENCODER, 4, "gpipe"),
    pair(VAE, 3, "1f1b"),
    pair(EMBEDDING, 3, "gpipe"),
    pair(FROZEN, 2, "1f1b"),
    pair(BARE, 3, "1f1b", split_points=["first", "squash"]),
    pair(NORMED, 2, "1f1b", num_microbatches=1),  # statistics of a part are not the batch's
    pair(CALLED, 2, "1f1b"),
]


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_model_trains_as_in_a_single_process(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert_same_run(farm.start(single).outcome[0], ranks)


@pytest.mark.parametrize(
    "pipeline",
    [
        Order(ranks=2, model="Vae", validation=False, strategy={"schedule": "1f1b"}, trainer={"max_epochs": 1}),
        Order(ranks=3, model="Vae", validation=False, strategy={}, trainer={"max_epochs": 1}),
        EMBEDDING.over(2, strategy={}),
        DEMO.over(3, strategy={"schedule": "pipedream_2bw"}),
    ],
    ids=["noise-2-1f1b", "noise-3-pipedream", "embedding-2-pipedream", "demo-3-2bw"],
)
def test_all_ranks_end_with_one_model(farm: Farm, pipeline: Order) -> None:
    """Random noise and late updates make it another run than a single process's, but one and the same on all ranks."""
    ranks = farm.start(pipeline).outcome
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])
    assert len(ranks[0]["losses"]) >= 4
    assert ranks[0]["losses"][-1] != ranks[0]["losses"][0]
    for found in ranks[1:]:
        assert_weights(found["weights"], ranks[0]["weights"])
        assert found["after_fit"] == ranks[0]["after_fit"]
        assert found["initial"].keys() != ranks[0]["initial"].keys()


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        (BORING, BORING.over(1, strategy="pipedream")),
        (FROZEN, FROZEN.over(1, strategy={"schedule": "gpipe", "num_microbatches": 2})),
    ],
    ids=["pipedream", "gpipe"],
)
def test_one_device_is_a_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    assert_same_run(farm.start(single).outcome[0], farm.start(pipeline).outcome)
