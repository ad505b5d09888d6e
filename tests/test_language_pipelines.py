"""The language recipes over processes: synchronous pipelines equal a single process, tied weights included."""

import math
from pathlib import Path
from typing import Any

import pytest
from pipedream_farm import Farm, Order
from test_pipedream_synchronous import assert_metrics, assert_weights

pytest_plugins = "pipedream_plugin"

LOSS = 2e-6
BERT, SQUAD, LM, TIED = (
    Order("language_tasks.fit", recipe=recipe) for recipe in ("bert", "bert_squad", "transformer_lm", "tied_lm")
)


def pair(single: Order, ranks: int, schedule: str, **strategy: Any) -> Any:
    pipeline = single.over(ranks, strategy={"schedule": schedule, **strategy})
    return pytest.param(single, pipeline, id=f"{single.options['recipe']}-{ranks}-{schedule}")


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pair(BERT, 2, "1f1b"),
        pair(BERT, 3, "gpipe"),
        pair(SQUAD, 2, "gpipe"),
        pair(SQUAD, 3, "1f1b"),
        pair(LM, 2, "1f1b"),
        pair(TIED, 3, "1f1b"),
        pair(BERT, 2, "1f1b", plan="auto"),
    ],
)
def test_a_synchronous_pipeline_is_the_single_run(farm: Farm, single: Order, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    expected = farm.start(single).outcome[0]
    assert len(expected["losses"]) == 6
    assert expected["losses"][-1] < expected["losses"][0]
    assert ranks[0]["losses"] == pytest.approx(expected["losses"], abs=LOSS, rel=0)
    for rank, found in enumerate(ranks):
        assert_metrics(found["validated"], expected["validated"], f"rank {rank}")
        assert_weights(found["weights"], expected["weights"])


@pytest.mark.parametrize(
    "pipeline",
    [
        BERT.over(2, strategy={}, epochs=3),
        SQUAD.over(3, strategy={}, epochs=3),
        TIED.over(2, strategy={"schedule": "pipedream_2bw"}, epochs=3),
        LM.over(2, strategy={"plan": "auto"}, epochs=3),
    ],
    ids=["bert-2-pipedream", "squad-3-pipedream", "tied-2-2bw", "lm-2-auto"],
)
def test_an_asynchronous_pipeline_learns_and_all_ranks_end_with_one_model(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])
    assert ranks[0]["losses"][-2] < ranks[0]["losses"][0]
    for found in ranks[1:]:
        assert_weights(found["weights"], ranks[0]["weights"])


@pytest.mark.parametrize("order", [BERT.over(2, strategy="ddp"), LM.over(2, strategy="ddp")], ids=["bert", "lm"])
def test_data_parallel_ranks_end_with_one_model(farm: Farm, order: Order) -> None:
    first, second = farm.start(order).outcome
    assert first["losses"] != second["losses"]  # each has its own half of the data
    assert_weights(second["weights"], first["weights"])


def shared_rows(farm: Farm, root: Path, ranks: int, **options: Any) -> list[list[list[int]]]:
    order = Order("language_tasks.shares", ranks=ranks, root=str(root), **options)
    return [found["rows"] for found in farm.start(order).outcome]
