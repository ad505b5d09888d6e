"""The language recipes over processes: synchronous pipelines equal a single process, tied weights included."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from language_tasks import made
from pipedream_farm import Farm, Order
from test_language_data import write_shard
from test_pipedream_synchronous import assert_metrics, assert_weights
from torch import Tensor

pytest_plugins = "pipedream_plugin"

LOSS = 2e-6
BERT, SQUAD, LM, TIED = (
    Order("language_tasks.fit", recipe=recipe) for recipe in ("bert", "bert_squad", "transformer_lm", "tied_lm")
)


STEERED_BY_ROUNDING = ("key.bias", "layers.1.output_norm.bias", "span.classifier.bias")
"""A softmax over tokens does not change when all move alike: their gradient is rounding, which Adam enlarges."""


def steered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    answers = "span.classifier.bias" in weights
    return {name: value for name, value in weights.items() if not (answers and name.endswith(STEERED_BY_ROUNDING))}


def pair(single: Order, ranks: int, schedule: str, *, slow: bool = False, **strategy: Any) -> Any:
    pipeline = single.over(ranks, strategy={"schedule": schedule, **strategy})
    name = "-".join([single.options["recipe"], str(ranks), schedule, *map(str, strategy.values())])
    return pytest.param(single, pipeline, id=name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("single", "pipeline"),
    [
        pair(BERT, 2, "1f1b"),
        pair(BERT, 3, "gpipe", slow=True),
        pair(SQUAD, 2, "gpipe", slow=True),
        pair(SQUAD, 3, "1f1b"),
        pair(LM, 2, "1f1b", slow=True),
        pair(TIED, 3, "1f1b"),
        pair(BERT, 2, "1f1b", plan="auto"),
        pair(SQUAD, 2, "1f1b", slow=True, plan="auto"),
        pair(LM, 2, "1f1b", slow=True, plan="auto"),
        pair(TIED, 2, "gpipe", slow=True, plan="auto"),
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
        assert_weights(steered(found["weights"]), steered(expected["weights"]))


@pytest.mark.parametrize(
    "pipeline",
    [
        pytest.param(BERT.over(2, strategy={}, epochs=3), id="bert-2-pipedream"),
        pytest.param(SQUAD.over(3, strategy={}, epochs=3), id="squad-3-pipedream", marks=pytest.mark.slow),
        pytest.param(
            TIED.over(2, strategy={"schedule": "pipedream_2bw"}, epochs=3), id="tied-2bw", marks=pytest.mark.slow
        ),
        pytest.param(LM.over(2, strategy={"plan": "auto"}, epochs=3), id="lm-2-auto", marks=pytest.mark.slow),
    ],
)
def test_an_asynchronous_pipeline_learns_and_all_ranks_end_with_one_model(farm: Farm, pipeline: Order) -> None:
    ranks = farm.start(pipeline).outcome
    assert all(math.isfinite(loss) for loss in ranks[0]["losses"])
    assert ranks[0]["losses"][-2] < ranks[0]["losses"][0]
    for found in ranks[1:]:
        assert_weights(found["weights"], ranks[0]["weights"])


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(BERT.over(2, strategy="ddp"), id="bert"),
        pytest.param(SQUAD.over(2, strategy="ddp"), id="bert_squad", marks=pytest.mark.slow),
        pytest.param(LM.over(2, strategy="ddp"), id="lm", marks=pytest.mark.slow),
    ],
)
def test_data_parallel_averages_the_gradients_of_its_ranks(farm: Farm, order: Order, one_thread: None) -> None:
    """Against one model in one process, which takes the mean of the gradients of both ranks' batches."""
    first, second = farm.start(order).outcome
    assert first["losses"] != second["losses"]  # each has its own half of the data
    assert_weights(second["weights"], first["weights"])
    expected = averaged_training(order.options["recipe"], [first["batches"], second["batches"]])
    for found, theirs in zip((first, second), expected, strict=True):
        assert len(theirs) == 3
        assert found["losses"] == pytest.approx(theirs, abs=LOSS, rel=0)


def averaged_training(recipe: str, batches: list[list[Any]]) -> list[list[float]]:
    """Each rank's losses; gradients are clipped and the rate follows its schedule as in `language_tasks.fit`."""
    torch.manual_seed(1000)
    model, _ = made(recipe)
    model.trainer = SimpleNamespace(estimated_stepping_batches=len(batches[0]))  # type: ignore[assignment]
    model.log = lambda *_, **__: None  # type: ignore[method-assign]
    training: Any = model.configure_optimizers()
    losses: list[list[float]] = [[] for _ in batches]
    for number, together in enumerate(zip(*batches, strict=True)):
        model.zero_grad()
        for rank, batch in enumerate(together):
            loss: Any = model.training_step(batch, number)
            (loss / len(batches)).backward()
            losses[rank].append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        training["optimizer"].step()
        training["lr_scheduler"]["scheduler"].step()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_dealt_out_to_ranks_and_shared_by_a_pipeline(farm: Farm, tmp_path: Path, workers: int) -> None:
    """Data parallel ranks have different batches and together all; the ranks of a pipeline have the same ones."""
    for number in range(3):
        write_shard(tmp_path / f"train_{number}.hdf5", rows=range(20 * number, 20 * number + 20))
    write_shard(tmp_path / "val_0.hdf5", rows=range(900, 904))

    def epochs(ranks: int, **strategy: Any) -> list[list[list[list[int]]]]:
        order = Order("language_tasks.shares", ranks=ranks, root=str(tmp_path), workers=workers, **strategy)
        found = [result["rows"] for result in farm.start(order).outcome]
        return [[rows[: len(rows) // 2], rows[len(rows) // 2 :]] for rows in found]

    first, second = epochs(2, strategy="ddp")
    for epoch in range(2):
        assert len(first[epoch]) == len(second[epoch]) == 8  # of fifteen batches one comes twice
        together = first[epoch] + second[epoch]
        assert {row for batch in together for row in batch} == set(range(60))
        assert not {tuple(batch) for batch in first[epoch][:-1]} & {tuple(batch) for batch in second[epoch][:-1]}
    assert first[0] != first[1]
    (alone,) = epochs(1)
    assert epochs(2, strategy={"schedule": "1f1b"}) == [alone, alone]
    assert sorted(row for batch in alone[0] for row in batch) == list(range(60))
