"""Uneven workers under Lightning: every batch once, epochs that end together, numbers of the written reference."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order
from pipedream_models import make
from torch.nn import functional as F
from uneven_reference import Workers, replay_events

from pl_pipe.comm.synchronizers import Event
from pl_pipe.grouping import Group
from pl_pipe.report.averaging_chart import draw_averaging

pytest_plugins = "pipedream_plugin"

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
DATA = {"samples": 74, "shuffle": True}  # 19 batches of 4, the last of 2


def order(ranks: int, strategy: str, *, slow: dict[str, float] | None = None, **options: Any) -> Order:
    given = {"data": DATA, "slow": slow or {}, **options}
    return Order("uneven_tasks.fit", ranks=ranks, strategy=strategy, **given)


SLOW = {"1": 0.1}  # seconds a batch: beside it, what a busy machine keeps the others waiting is little
EXACT: dict[str, Any] = {"trainer": {"precision": "64-true", "max_epochs": 3}}
PARTIAL = order(3, "partial_reduce", slow=SLOW, **EXACT)
SELDOM = order(3, "partial_reduce", slow=SLOW, options={"every": 3, "connect_every": 1}, **EXACT)
ALL = [
    pytest.param(PARTIAL, id="partial_reduce"),
    pytest.param(order(3, "ad_psgd", slow=SLOW), id="ad_psgd", marks=pytest.mark.slow),
    pytest.param(
        order(3, "hetpipe", slow=SLOW, options={"wave": 2, "distance": 1}), id="hetpipe", marks=pytest.mark.slow
    ),
    pytest.param(
        order(3, "data_parallel", slow=SLOW, options={"synchronizer": "pair"}), id="pair", marks=pytest.mark.slow
    ),
    pytest.param(
        order(2, "data_parallel", slow=SLOW, options={"synchronizer": "local"}), id="local", marks=pytest.mark.slow
    ),
]


def samples_of(batches: list[Any]) -> Counter[tuple[float, ...]]:
    return Counter(tuple(row.tolist()) for x, _ in batches for row in x)


def accuracies(notes: dict[str, Any]) -> list[float]:
    """Of all workers together; what a step logs without sync_dist is a worker's own, as under DDP."""
    return [metrics["val_acc"] for metrics in notes["validated"]]


def test_the_picture_is_drawn_from_the_counts(tmp_path: Path) -> None:
    partners = {0: {1: 3, 2: 40}, 1: {0: 3}, 2: {0: 40}}
    draw_averaging(partners, {0: 10.0, 1: 2.5, 2: 9.0}, tmp_path / "picture.png", title="three workers")
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.parametrize("order", ALL)
def test_every_sample_is_trained_on_once_and_all_end_alike(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    epochs = len(found[0]["batches"])
    for epoch in range(epochs):
        together = sum((samples_of(notes["batches"][epoch]) for notes in found), Counter())
        assert len(together) == 74
        assert set(together.values()) == {1}
        assert all(notes["batches"][epoch] for notes in found)
    for notes in found:
        assert len(notes["ends"]) == epochs
        for name, value in notes["weights"].items():
            assert torch.equal(value, found[0]["weights"][name]), name
        assert accuracies(notes) == accuracies(found[0])
        assert notes["steps"] == found[0]["steps"]
        assert notes["samples"] == 74 * epochs
    fast, slow = (sum(map(len, found[rank]["batches"])) for rank in (0, 1))
    assert fast > slow
    names = {"group_size", "waited_s", "staleness", "workers", "samples_per_s/rank0", "samples_per_s/rank1"}
    assert {f"sync/{name}" for name in names} <= set(found[0]["metrics"])


@pytest.mark.parametrize("order", [PARTIAL, SELDOM])
def test_partial_reduce_is_its_reference(farm: Farm, order: Order) -> None:
    """Steps in the recorded order of groups; then everything is averaged, and the next epoch begins."""
    found = farm.start(order).outcome
    every = order.options.get("options", {}).get("every", 1)
    workers = range(3)
    models = [make("Mlp").double() for _ in workers]
    for model in models:
        model.load_state_dict(found[0]["initial"])
    optimizers: list[Any] = [model.configure_optimizers() for model in models]
    groups = iter(found[0]["groups"])
    for epoch in range(len(found[0]["ends"])):
        left = [list(notes["batches"][epoch]) for notes in found]
        met: list[Group] = []

        def step(rank: int, left: list[Any] = left) -> None:
            x, y = left[rank].pop(0)
            optimizers[rank].zero_grad()
            F.cross_entropy(models[rank](x), y).backward()
            optimizers[rank].step()

        while any(len(batches) >= every for batches in left):
            met.append(next(groups))
            for rank in met[-1].members:
                for _ in range(every):
                    step(rank)
            average([models[rank] for rank in met[-1].members], [])
        for rank in workers:
            while left[rank]:  # too few to meet anyone
                step(rank)
        average(models, optimizers)
        for name, value in models[0].named_parameters():
            torch.testing.assert_close(found[0]["ends"][epoch][name], value.detach(), **TIGHT)
    assert next(groups, None) is None
    assert any(len(group.members) > 1 for group in found[0]["groups"])
    meetings = sum(len(group.members) for group in met)
    staleness = sum(len(group.members) * (max(group.iterations) - min(group.iterations)) for group in met)
    logged = found[0]["metrics"]
    assert logged["sync/group_size"] == pytest.approx(sum(len(group.members) ** 2 for group in met) / max(1, meetings))
    assert logged["sync/staleness"] == pytest.approx(staleness / max(1, meetings))


class Fitted(Workers):
    """Workers that train on the batches that those of a run had."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        super().__init__(len(found), 0)
        self.models: list[Any] = [make("Mlp").double() for _ in found]
        for model in self.models:
            model.load_state_dict(found[0]["initial"])
        self.optimizers = [model.configure_optimizers() for model in self.models]
        self.batches = [[batch for epoch in notes["batches"] for batch in epoch] for notes in found]

    def loss(self, rank: int) -> torch.Tensor:
        x, y = self.batches[rank][self.steps[rank]]
        return F.cross_entropy(self.models[rank](x), y)


@pytest.mark.parametrize(
    "order", [order(3, "ad_psgd", slow=SLOW, trainer={"precision": "64-true", "max_epochs": 1}, seed=2)]
)
def test_ad_psgd_is_its_reference(farm: Farm, order: Order) -> None:
    """Events in the recorded order; then the mean of all."""
    found = farm.start(order).outcome
    histories = {rank: [Event(*event) for event in notes["history"]] for rank, notes in enumerate(found)}
    x = replay_events(Fitted(found), histories)
    assert all(not torch.equal(x[0], other) for other in x[1:])
    ours = torch.cat([found[0]["weights"][name].reshape(-1) for name, _ in make("Mlp").named_parameters()])
    torch.testing.assert_close(ours, torch.stack(x).mean(0), **TIGHT)


@torch.no_grad()
def average(models: list[Any], optimizers: list[Any]) -> None:
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        mean = sum(parameters) / len(parameters)
        for parameter in parameters:
            parameter.copy_(mean)
        if optimizers:
            buffers = [one.state[p]["momentum_buffer"] for one, p in zip(optimizers, parameters, strict=True)]
            mean = sum(buffers) / len(buffers)
            for buffer in buffers:
                buffer.copy_(mean)


LOCKSTEP = {"data": {"samples": 32, "shuffle": True}, "trainer": {"precision": "64-true"}, "scheduler": "step"}


@pytest.mark.parametrize(
    ("ours", "ddp"),
    [
        (
            Order("uneven_tasks.fit", ranks=2, strategy="data_parallel", **LOCKSTEP),
            Order("uneven_tasks.fit", ranks=2, strategy="ddp", **LOCKSTEP),
        ),
        (
            Order("uneven_tasks.fit", ranks=2, strategy="data_parallel", model="Clamped", **LOCKSTEP),
            Order("uneven_tasks.fit", ranks=2, strategy="ddp", model="Clamped", **LOCKSTEP),
        ),
    ],
)
def test_allreduce_is_lightnings_data_parallelism(farm: Farm, ours: Order, ddp: Order) -> None:
    for mine, theirs in zip(farm.start(ours).outcome, farm.start(ddp).outcome, strict=True):
        assert [len(epoch) for epoch in mine["batches"]] == [4, 4]
        for name, value in theirs["weights"].items():
            torch.testing.assert_close(mine["weights"][name], value, **TIGHT)
        assert mine["rate"] == theirs["rate"]
        for name, value in theirs["validated"][-1].items():
            if name != "train_loss_step":
                assert mine["validated"][-1][name] == pytest.approx(value, abs=1e-9), name


SINGLE = Order("uneven_tasks.fit", ranks=1, strategy="single", data=DATA, trainer={"max_epochs": 3})
SAVED = order(
    3, "partial_reduce", slow=SLOW, scheduler="epoch", checkpoint={"filename": "{epoch}", "save_top_k": -1},
    optimizer="adamw",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order", [SAVED])
def test_checkpoints_are_plain_and_whole(farm: Farm, order: Order) -> None:
    """What rank 0 writes has the average of all; a single process goes on from it."""
    job = farm.start(order)
    found = job.outcome
    assert found[0]["kept"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    content = torch.load(job.folder / "kept" / "epoch=1.ckpt", weights_only=False)
    for notes in found:
        for name, value in content["state_dict"].items():
            assert torch.equal(value, notes["ends"][1][name])
        assert notes["rate"] == content["optimizer_states"][0]["param_groups"][0]["lr"]
    path = str(job.folder / "kept" / "epoch=0.ckpt")
    resumed = {"optimizer": "adamw", "scheduler": "epoch", "data": DATA, "ckpt_path": path}
    for again in (
        Order("uneven_tasks.fit", ranks=1, strategy="single", **resumed),
        Order("uneven_tasks.fit", ranks=2, strategy="ad_psgd", **resumed),
    ):
        for notes in farm.start(again).outcome:
            assert notes["epoch"] == 2
            assert len(notes["batches"]) == 1


STOPS = [
    pytest.param(order(3, "partial_reduce", slow=SLOW, trainer={"max_steps": 5}), 5, id="max-steps"),
    pytest.param(order(3, "ad_psgd", slow=SLOW, trainer={"limit_train_batches": 2}), None, id="limit"),
    pytest.param(
        order(3, "partial_reduce", slow=SLOW, strike={"rank": 2, "how": "stop", "batch": 3}), None, id="should-stop"
    ),
    pytest.param(order(2, "hetpipe", trainer={"fast_dev_run": True}), None, id="fast-dev-run"),
    pytest.param(order(3, "ad_psgd", data={"samples": 5}, trainer={"accumulate_grad_batches": 2}), None, id="tiny"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "steps"), STOPS)
def test_all_workers_stop_together(farm: Farm, order: Order, steps: int | None) -> None:
    found = farm.start(order).outcome
    for notes in found:
        assert notes["epoch"] == found[0]["epoch"]
        assert accuracies(notes) == accuracies(found[0])
        assert torch.equal(notes["weights"]["layers.0.0.weight"], found[0]["weights"]["layers.0.0.weight"])
    if steps is not None:
        assert found[0]["steps"] == steps
    if "strike" in order.options:
        assert found[0]["epoch"] == 1
        assert len(found[0]["batches"]) == 1
    if order.options.get("trainer", {}).get("limit_train_batches"):
        assert [sum(len(notes["batches"][epoch]) for notes in found) for epoch in (0, 1)] == [6, 6]


@pytest.mark.parametrize(
    "order", [order(3, "partial_reduce", slow={"0": 0.05}, trainer={"max_steps": 6, "max_epochs": -1})]
)
def test_a_fast_worker_with_all_its_steps_done_ends_no_epoch(farm: Farm, order: Order) -> None:
    """Rank 0 counts, and is slow: the others have done their 6 steps when it has done a few of the 19 batches."""
    found = farm.start(order).outcome
    assert found[0]["steps"] == 6
    done = [len(notes["batches"][0]) for notes in found]
    assert max(done) <= 6
    if done[0] < 6:  # the epoch ended for want of batches; but for those that the fast had loaded already
        assert sum(done) >= 17


@pytest.mark.parametrize(
    "order", [order(3, "partial_reduce", held=13, logs=True, trainer={"max_epochs": 1, "num_sanity_val_steps": 1})]
)
def test_hooks_of_an_evaluation_need_no_equal_numbers_of_batches(farm: Farm, order: Order) -> None:
    """Rank 0 has two batches to evaluate and the others one each; a hook after each logs its rank."""
    found = farm.start(order).outcome
    for notes in found:
        assert notes["validated"][-1]["hooked_epoch"] == pytest.approx((0 + 0 + 1 + 2) / 4)
        assert accuracies(notes) == accuracies(found[0])
        assert notes["metrics"]["sync/workers"] == 3


AGAIN = order(2, "partial_reduce", calls=2, trainer={"max_epochs": 1}, data={"workers": 1}, evaluate=True)


@pytest.mark.slow
@pytest.mark.parametrize("order", [AGAIN])
def test_a_trainer_fits_again_and_evaluates(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    for notes in found:
        assert notes["epoch"] == 1
        validated, tested = notes["evaluated"]
        assert validated["val_acc"] == tested["test_acc"] == found[0]["evaluated"][0]["val_acc"]
        assert notes["predicted"] == 1
