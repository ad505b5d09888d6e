"""GNMT under every strategy: synchronous pipelines equal the single process, late ones end with one model."""

import math

import pytest
import torch
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_weights

pytest_plugins = "pipedream_plugin"

FIT = "translation_tasks.fit"
LOSS = 1e-6  # relative: losses are sums over a sentence, of about 100
PLAIN = Order(FIT)
SHARED = Order(FIT, model={"share_embedding": True}, seed=1)
SMALL = {"encoder_layers": 2, "decoder_layers": 3}
SHALLOW = Order(FIT, model=SMALL, data={"length_multiple": 4}, seed=2)

PAIRS = [
    pytest.param(PLAIN, PLAIN.over(2, strategy={"schedule": "1f1b"}), id="gnmt8-2-1f1b"),
    pytest.param(PLAIN, PLAIN.over(3, strategy={"schedule": "gpipe"}), id="gnmt8-3-gpipe", marks=pytest.mark.slow),
    pytest.param(SHARED, SHARED.over(3, strategy={"schedule": "1f1b"}), id="shared-3-1f1b", marks=pytest.mark.slow),
    pytest.param(SHALLOW, SHALLOW.over(2, strategy={"schedule": "1f1b", "load_data": "needed"}), id="needed-2-1f1b"),
]


AUTO = [
    pytest.param(
        single,
        single.over(2, strategy={"schedule": schedule, "plan": "auto"}),
        id=f"{name}-2-{schedule}",
        marks=[pytest.mark.slow] if slow else [],
    )
    for name, single, schedule, slow in (
        ("shallow", SHALLOW, "1f1b", False),
        ("gnmt8", PLAIN, "gpipe", True),
        ("shared", SHARED, "1f1b", True),
    )
]


@pytest.mark.parametrize(("single", "pipeline"), AUTO)
def test_whatever_the_planner_chooses_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    """So small a network may be planned as stages or as replicas, by what was measured: losses are the same."""
    ranks = farm.start(pipeline).outcome
    expected = farm.start(single).outcome[0]
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=LOSS)
    for found in ranks:
        assert_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize(("single", "pipeline"), PAIRS)
def test_a_synchronous_pipeline_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    """Lengths differ from batch to batch, and sentences within a micro-batch; the last batch is smaller."""
    ranks = farm.start(pipeline).outcome
    expected = farm.start(single).outcome[0]
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], rel=LOSS)
    assert ranks[0]["rates"] == pytest.approx(expected["rates"], rel=1e-9)
    for metrics, theirs in zip(ranks[0]["validated"], expected["validated"], strict=True):
        assert metrics == pytest.approx(theirs, rel=1e-5)
    for found in ranks:
        assert_weights(found["weights"], expected["weights"])
    assert len(set(expected["shapes"])) > 2
    assert {shape[0][0] for shape in expected["shapes"]} == {4, 2}
    for found in ranks:
        assert found["own"], "a stage without a layer"
        assert len(found["plan"].stages) == pipeline.ranks


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(PLAIN.over(2, strategy={}), id="straight-2-pipedream"),
        pytest.param(PLAIN.over(3, strategy={"schedule": "pipedream_2bw"}), id="three-2bw", marks=pytest.mark.slow),
        pytest.param(SHALLOW.over(2, strategy={"plan": "auto"}), id="auto-2-pipedream", marks=pytest.mark.slow),
    ],
)
def test_a_late_pipeline_trains_and_ends_with_one_model(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    losses = ranks[0]["losses"]
    assert all(map(math.isfinite, losses))
    assert ranks[0]["validated"][-1]["val_token_loss"] < ranks[0]["validated"][0]["val_token_loss"]
    for found in ranks[1:]:
        assert_weights(found["weights"], ranks[0]["weights"])


def test_data_parallel_ranks_share_the_corpus(farm: Farm) -> None:
    """Two ranks with half of the batch each make the updates of one: sentences are dealt out, none twice."""
    order = Order(FIT, trainer={"max_epochs": 1}, data={"sentences": 16, "batch_size": 4})
    whole = farm.start(order).outcome[0]
    halves = farm.start(order.over(2, strategy="ddp", data={"sentences": 16, "batch_size": 2})).outcome
    assert halves[0]["steps"] == whole["steps"] == 4
    mean = [(a + b) / 2 for a, b in zip(halves[0]["losses"], halves[1]["losses"], strict=True)]
    assert mean == pytest.approx(whole["losses"], rel=LOSS)
    assert_weights(halves[0]["weights"], whole["weights"])


def test_the_checkpoint_brings_the_vocabulary(farm: Farm) -> None:
    job = farm.start(PAIRS[0].values[1])
    assert job.outcome
    kept = torch.load(job.folder / "kept" / "end.ckpt", weights_only=True)
    assert kept["TranslationData"]["vocabulary"].startswith("{")
