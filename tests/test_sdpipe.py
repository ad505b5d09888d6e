"""Several pipelines under Lightning: numbers of the written reference, epochs that end together, faults, refusals."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pipedream_farm import Farm, Order
from sdpipe_reference import Pipelines
from test_pipedream_launched import launched

from pl_pipe.errors import ConfigError
from pl_pipe.strategies import SDPipeStrategy
from pl_pipe.strategies.pipeline.pipedream_config import pipedream
from pl_pipe.strategies.uneven.placement import placement_of

pytest_plugins = "pipedream_plugin"

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
EXACT: dict[str, Any] = {"precision": "64-true", "max_epochs": 2}
SLOW = {"2": 0.1, "3": 0.1}
"""Seconds a batch, by rank: enough on a busy machine too."""


def order(synchronizer: str, *, ranks: int = 4, pipelines: int = 2, samples: int = 46, **options: Any) -> Order:
    settings = {"synchronizer": synchronizer, "pipelines": pipelines, **options.pop("options", {})}
    given = {"data": {"samples": samples, "shuffle": True}, "trainer": EXACT, **options}
    lost = given.pop("lost", ())
    return Order("uneven_tasks.fit", ranks=ranks, strategy="sdpipe", options=settings, lost=lost, **given)


def reporters(found: list[dict[str, Any]], of: Order) -> list[dict[str, Any]]:
    """Of each pipeline, what one rank has noted; all its ranks have trained on the same."""
    depth = of.ranks // of.options["options"]["pipelines"]
    for start in range(0, of.ranks, depth):
        for notes in found[start + 1 : start + depth]:
            for own, first in zip(notes["batches"], found[start]["batches"], strict=True):
                assert all(torch.equal(x, z) for (x, _), (z, _) in zip(own, first, strict=True))
    return found[::depth]


def samples_of(batches: list[Any]) -> Counter[tuple[float, ...]]:
    return Counter(tuple(row.tolist()) for x, _ in batches for row in x)


def check_end(found: list[dict[str, Any]], reference: Pipelines) -> None:
    for notes in found:
        for name, value in reference.now[0].items():
            torch.testing.assert_close(notes["weights"][name], value, **TIGHT)


PARTIAL = [
    pytest.param(order("partial_reduce", slow=SLOW), id="two-of-two"),
    pytest.param(  # 19 batches
        order("partial_reduce", samples=74, slow=SLOW, options={"every": 2, "connect_every": 1}), id="every-second"
    ),
    pytest.param(
        order("partial_reduce", ranks=6, pipelines=3, samples=70, slow=SLOW, seed=3), id="three", marks=pytest.mark.slow
    ),
    pytest.param(
        order("partial_reduce", ranks=6, samples=54, slow={"4": 0.1}, seed=5), id="deeper", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("order", PARTIAL)
def test_partial_reduce_is_its_reference_stage_by_stage(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    pipelines, every = order.options["options"]["pipelines"], order.options["options"].get("every", 1)
    depth = order.ranks // pipelines
    firsts = reporters(found, order)
    assert len({tuple(map(len, notes["batches"])) for notes in firsts}) > 1, "the slow pipeline did fewer batches"
    reference = Pipelines(found[0]["initial"], pipelines=pipelines, depth=depth)
    left: list[list[tuple[int, ...]]] = [[] for _ in range(depth)]
    for group in found[0]["groups"]:
        left[depth - 1 - group.members[0] % depth].append(tuple(rank // depth for rank in group.members))
    assert any(len(members) > 1 for stage in left for members in stage)
    for epoch in range(2):
        batches = [notes["batches"][epoch] for notes in firsts]
        together = sum(map(samples_of, batches), Counter())
        assert set(together.values()) == {1}
        assert len(together) == order.options["data"]["samples"]
        meetings = Counter({p: len(own) // every for p, own in enumerate(batches)})
        reference.epoch(batches, [taken(stage, meetings) for stage in left], every=every)
    assert not any(left)
    check_end(found, reference)
    assert found[0]["samples"] == 2 * order.options["data"]["samples"]
    assert {"sync/samples_per_s/pipeline0", "sync/samples_per_s/pipeline1"} <= set(found[0]["metrics"])
    assert all(notes["validated"] == found[0]["validated"] for notes in found)


def taken(groups: list[tuple[int, ...]], counts: Counter[int]) -> list[tuple[int, ...]]:
    """The groups of an epoch, in which each pipeline meets others so often; they leave the list."""
    left, found = Counter(counts), []
    while +left:
        found.append(groups.pop(0))
        left.subtract(found[-1])
    return found


SUMMED = [
    pytest.param(order("allreduce", samples=46), id="two-of-two"),
    pytest.param(order("allreduce", ranks=6, pipelines=2, samples=49, seed=2), id="deeper", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("order", SUMMED)
def test_allreduce_is_data_parallel_pipelines(farm: Farm, order: Order) -> None:
    """Batches in rounds, the last of which begins anew; gradients are the mean of both pipelines'."""
    found = farm.start(order).outcome
    firsts = reporters(found, order)
    depth = order.ranks // 2
    reference = Pipelines(found[0]["initial"], pipelines=2, depth=depth)
    for epoch in range(2):
        batches = [notes["batches"][epoch] for notes in firsts]
        assert len(batches[0]) == len(batches[1]) == math.ceil(math.ceil(order.options["data"]["samples"] / 4) / 2)
        assert len(sum(map(samples_of, batches), Counter())) == order.options["data"]["samples"]
        reference.epoch(batches, [[(0, 1)] * len(batches[0])] * depth, gradients=True)
    check_end(found, reference)


OTHERS = [
    pytest.param(order("ad_psgd", slow=SLOW), id="ad_psgd"),
    pytest.param(order("wave", slow=SLOW, options={"wave": 2, "distance": 1}), id="wave"),
    pytest.param(order("sma"), id="sma"),
    pytest.param(order("pair", slow=SLOW), id="pair"),
    pytest.param(order("ad_psgd", options={"matching": True}), id="matching"),
    pytest.param(order("local", slow=SLOW), id="local"),
    pytest.param(
        order("partial_reduce", slow=SLOW, options={"schedule": "1f1b"}, checkpoint={"filename": "{epoch}"}), id="1f1b"
    ),
    pytest.param(
        order("partial_reduce", slow=SLOW, options={"schedule": "pipedream_2bw"}, trainer={"max_steps": 5}), id="2bw"
    ),
    pytest.param(  # by the quick pipeline, which is sure to come to its third batch
        order("partial_reduce", slow={"0": 0.1, "1": 0.1}, strike={"rank": 2, "how": "stop", "batch": 2}),
        id="should-stop",
    ),
    pytest.param(order("allreduce", strike={"rank": 2, "how": "stop", "batch": 2}), id="should-stop-in-step"),
    pytest.param(order("sma", strike={"rank": 2, "how": "stop", "batch": 2}), id="should-stop-in-step-sma"),
    pytest.param(order("partial_reduce", calls=2, evaluate=True, trainer={"max_epochs": 1}), id="again"),
    pytest.param(order("partial_reduce", options={"placement": [[0, 2], [1, 3]]}), id="placement"),
    pytest.param(order("partial_reduce", options={"load_data": "needed"}), id="outlines"),
    pytest.param(order("partial_reduce", slow=SLOW, model="Normed"), id="batch-norm"),
]


@pytest.mark.slow
@pytest.mark.parametrize("order", OTHERS)
def test_all_pipelines_end_alike(farm: Farm, order: Order) -> None:
    found = farm.start(order).outcome
    for notes in found:
        assert notes["epoch"] == found[0]["epoch"]
        assert notes["steps"] == found[0]["steps"]
        for name, value in notes["weights"].items():
            assert torch.equal(value, found[0]["weights"][name]), name
        assert notes["validated"] == found[0]["validated"]
    if "strike" in order.options:
        assert found[0]["epoch"] == 1
    if order.options.get("strike") and order.options["options"]["synchronizer"] != "partial_reduce":
        assert {len(notes["batches"][0]) for notes in found} == {6}, "pipelines in step stop with the epoch"
    if order.options.get("checkpoint"):
        assert found[0]["kept"] == ["epoch=1.ckpt"]
    if order.options.get("evaluate"):
        assert [notes["written"] for notes in found] == [2, 0, 0, 0], "one pipeline's predictions are enough"


@pytest.mark.slow
@pytest.mark.parametrize("load_data", ["all", "needed"])
@pytest.mark.parametrize("rule", ["partial_reduce", "allreduce"])
def test_schedules_know_the_share_of_a_pipeline(farm: Farm, rule: str, load_data: str) -> None:
    """Twelve batches an epoch, of which a pipeline has half; the plan is made of a step that asks for the optimizer."""
    for notes in farm.start(order(rule, model="AsksLength", options={"load_data": load_data})).outcome:
        assert notes["metrics"]["asked"] == 12
        assert notes["rate"] == pytest.approx(0.0, abs=0.05)


def struck(how: str, *, rank: int = 2, **options: Any) -> Order:
    settings, strike = options.pop("options", {}), {"rank": rank, "how": how, "batch": 2, **options}
    return order(
        "partial_reduce", ranks=4, samples=90, slow=dict.fromkeys("0123", 0.01), options=settings, strike=strike,
        lost=[rank] if how == "SIGKILL" else [],
    )  # fmt: skip


@pytest.mark.parametrize(
    "order", [struck("SIGKILL", rank=3), pytest.param(struck("raise", rank=2), marks=pytest.mark.slow)]
)
def test_a_rank_that_ends_takes_its_pipeline_and_the_others_go_on(farm: Farm, order: Order) -> None:
    job = farm.start(order)
    found = job.results
    rank = order.options["strike"]["rank"]
    for notes in found[:2]:
        assert "error" not in notes, notes["traceback"]
        assert notes["epoch"] == 2
        assert notes["metrics"]["sync/workers"] == 1
        assert len(samples_of(notes["batches"][1])) == 90, "the second epoch has all data"
    assert any(f"rank {rank} (pipeline 1, stage" in notes["error"] for notes in found[2:] if "error" in notes)
    assert "its pipeline 1 ends, and training goes on with 1" in (job.folder / "rank0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "words"),
    [
        (struck("SIGKILL", options={"on_fault": "stop"}), "PeerError: rank 2 (pipeline 1, stage 1) is gone"),
        (struck("SIGKILL", rank=1), "PeerError: rank 1 (pipeline 0, stage 0) is gone"),
        (struck("SIGTERM", rank=3), "SIGTERMException"),
        (order("allreduce", strike={"rank": 3, "how": "SIGTERM", "batch": 2}), "SIGTERMException"),
    ],
)
def test_all_stop(farm: Farm, order: Order, words: str) -> None:
    for error in farm.start(order).errors:
        assert error.startswith(words), error


REFUSED = [
    (order("partial_reduce", trainer={"val_check_interval": 0.5}), "val_check_interval=0.5"),
    (order("allreduce", checkpoint={"every_n_train_steps": 2}), "every_n_train_steps=2"),
    (order("ad_psgd", ranks=6, pipelines=3, options={"matching": True}), "there are 3; take an even number"),
    (
        order("partial_reduce", model="AsksInSetup"),
        "before the pipelines have shared out the batches; ask",
    ),
    (order("wave", options={"servers": 3}), "servers=3; give a number from 1 to 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("order", "words"), REFUSED)
def test_what_pipelines_cannot_do_is_refused(farm: Farm, order: Order, words: str) -> None:
    for error in farm.start(order).errors:
        assert error.startswith("ConfigError"), error
        assert words in error


@pytest.mark.slow
def test_the_launched_survivors_finish(tmp_path: Path) -> None:
    code, text = launched(tmp_path, "sdpipe", script="launched_uneven.py")
    assert code == 0, text[-3000:]
    assert text.count("finished epoch 3") == 2, text[-3000:]
    assert "its pipeline 1 ends, and training goes on with 1" in text
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {f"epoch={epoch}.ckpt" for epoch in range(3)}


def test_a_placement_is_kept_and_rank_0_has_a_last_stage() -> None:
    """pipeline 0   pipeline 1
    stage 0            device 0     device 2       rank 0 runs on device 1, and rank 1 on device 0
    stage 1            device 1     device 3
    """
    found = placement_of([[2, 0], [3, 1]], None, devices=4, devices_a_node=4)
    assert found.stages == ((1, 2), (0, 3))
    assert found.devices == (1, 0, 2, 3)
    assert found.members(0) == (0, 1)
    assert [found.place(rank) for rank in range(4)] == [(0, 1), (0, 0), (1, 0), (1, 1)]
    plain = placement_of(None, 2, devices=6, devices_a_node=2)
    assert plain.stages == ((2, 5), (1, 4), (0, 3))


@pytest.mark.parametrize(
    ("rows", "pipelines", "devices", "words"),
    [
        (None, 1, 4, "pipelines=1; give a number of 2 or more"),
        (None, 3, 4, "pipelines=3 cannot share 4 devices equally"),
        (None, 4, 4, "have one stage each; set trainer.devices=8"),
        ([[0, 1]], None, 2, "have one stage each"),
        ([[0], [1]], None, 2, "placement has one pipeline"),
        ([[0, 1], [2, 2]], None, 4, "name each of 0 to 3 once"),
        ([[0, 1], [2]], None, 3, "give a list of stages"),
        ([[0, 2], [1, 3]], 3, 4, "pipelines=3, but placement has 2 columns"),
        ([[0, 1], [2, 3]], None, 4, "on device 2, which is on node 1"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(rows: Any, pipelines: int | None, devices: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placement_of(rows, pipelines, devices=devices, devices_a_node=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SDPipeStrategy(replicas=[2, 1]), "the replicas of a stage are the other pipelines'"),
        (lambda: SDPipeStrategy("allreduce", averaging="dynamic"), "is an option of synchronizer=partial_reduce"),
        (lambda: SDPipeStrategy("wave", on_fault="leave"), "waits for every worker"),
        (lambda: SDPipeStrategy("wave", every=2), "every=2 is an option of .*; set wave=2"),
        (lambda: SDPipeStrategy(every=0), "every=0; give the number of updates"),
        (lambda: SDPipeStrategy(rings=3), "rings=3 is no option"),
        (lambda: pipedream(synchronizer="pair", split_points=["a"], replicas=[3, 1]), "give equal numbers"),
    ],
)
def test_options_that_mean_nothing_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
