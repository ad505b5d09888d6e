"""Data that divide themselves, buffers that differ: every worker gets its share of all, and the first one's buffers."""

from collections import Counter
from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import SDPipeStrategy
from pl_pipe.strategies.uneven.support import batches_of

pytest_plugins = "pipedream_plugin"

SLOW = {"1": 0.05}


def whole(ranks: int, strategy: str, **options: Any) -> Order:
    return Order("uneven_tasks.fit", ranks=ranks, strategy=strategy, whole=True, data={"samples": 74}, **options)


WHOLE = [
    pytest.param(whole(3, "partial_reduce", slow=SLOW, held=26), id="partial_reduce"),
    pytest.param(whole(4, "sdpipe", held=26), id="sdpipe", marks=pytest.mark.slow),
    pytest.param(
        whole(4, "sdpipe", held=26, options={"synchronizer": "allreduce"}), id="sdpipe-in-step", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("order", WHOLE)
def test_a_sampler_of_whole_batches_is_dealt_out(farm: Farm, order: Order) -> None:
    """The sampler would divide the batches by rank itself, and has another order for every epoch."""
    found = farm.start(order).outcome
    depth = 2 if order.options["strategy"] == "sdpipe" else 1
    epochs: list[list[list[float]]] = []
    for epoch in (0, 1):
        batches = [x for notes in found[::depth] for x, _ in notes["batches"][epoch]]
        times = Counter(tuple(row.tolist()) for x in batches for row in x)
        assert len(times) == 74
        repeated = 4 if "options" in order.options else 0  # of 19 batches, two pipelines in step have one twice
        assert sum(times.values()) == 74 + repeated
        epochs.append([notes["batches"][epoch][0][0].flatten().tolist() for notes in found[::depth]])
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    assert found[0]["validated"][-1]["val_acc"] == found[-1]["validated"][-1]["val_acc"]


@pytest.mark.parametrize("order", [Order("uneven_tasks.fit", ranks=3, strategy="partial_reduce", model="Buffered")])
def test_buffers_without_a_mean_are_the_first_ones(farm: Farm, order: Order) -> None:
    """They were drawn by seeds that differ, as in a script that sets none."""
    found = farm.start(order).outcome
    first = found[0]["initial"]
    assert not torch.equal(first["order"], found[1]["initial"]["order"])
    sums = [int(notes["initial"]["marks"].sum()) for notes in found]
    assert max(sums) > sums[0], "at an epoch's end the furthest worker's count, which is another's"
    for notes in found:
        for name in ("order", "marks"):
            assert torch.equal(notes["ends"][0][name], first[name]), name
        torch.testing.assert_close(notes["ends"][0]["turns"], first["turns"])


SAVED = {
    "data": {"samples": 74, "shuffle": True},
    "scheduler": "asked",
    "checkpoint": {"filename": "{epoch}", "save_top_k": -1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "order", [Order("uneven_tasks.fit", ranks=2, strategy="partial_reduce", trainer={"max_epochs": 2}, **SAVED)]
)
def test_a_resumed_run_has_the_order_of_its_epoch(farm: Farm, order: Order) -> None:
    """A schedule that asks how long training lasts has the loader begin before the checkpoint is read."""
    job = farm.start(order)
    found = job.outcome
    path = str(job.folder / "kept" / "epoch=0.ckpt")
    again = Order("uneven_tasks.fit", ranks=2, strategy="partial_reduce", ckpt_path=path, **SAVED)
    resumed = farm.start(again).outcome

    def second(found: list[dict[str, Any]]) -> set[frozenset[tuple[float, ...]]]:
        return {frozenset(tuple(row.tolist()) for row in x) for notes in found for x, _ in notes["batches"][-1]}

    assert second(resumed) == second(found)
    assert all(len(notes["batches"]) == 1 for notes in resumed)


def test_a_part_for_every_rank_is_refused() -> None:
    data = torch.arange(20).tolist()
    divided = DistributedSampler(data, num_replicas=4, rank=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="DistributedSampler keeps one of 4 parts of the data for each rank"):
        batches_of(DataLoader(data, 2, sampler=divided))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a batch sampler of its own"):
        batches_of(DataLoader(data, batch_sampler=[[0, 1], [2]]))  # type: ignore[arg-type]
    assert batches_of(DataLoader(data, batch_size=None)) == (20, 1, False)  # type: ignore[arg-type]
    plain = BatchSampler(RandomSampler(data), 3, drop_last=True)
    assert batches_of(DataLoader(data, batch_sampler=plain)) == (20, 3, True)  # type: ignore[arg-type]


def test_a_topology_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology=ring is for replicated stages of one pipeline"):
        SDPipeStrategy(topology="ring")
