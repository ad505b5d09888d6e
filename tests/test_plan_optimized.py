"""Which plan is made of given costs: replicas where they pay, a split by hand, one device where nothing else does."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planned_models import BATCH, Chain, Cost, chain_graph, chain_profile

from pl_pipe.cluster import Cluster, Level
from pl_pipe.errors import ConfigError, PlanError
from pl_pipe.graph import read_graph
from pl_pipe.partition import Plan, partition, split_by_hand, split_evenly, write_plan
from pl_pipe.partition.costs import cost_model
from pl_pipe.partition.placed import stages_step_s
from pl_pipe.partition.renumbered import with_rank_0_last
from pl_pipe.schedule import build_programs
from pl_pipe.simulate import simulate
from pl_pipe.strategies import AutoStrategy, PipeDreamStrategy
from pl_pipe.strategies.pipeline import plan_choice
from pl_pipe.strategies.pipeline.plan_choice import choose_plan
from pl_pipe.strategies.pipeline.plan_comparison import Comparison, compare, quickest, simulated_step_s
from pl_pipe.strategies.pipeline.run_cluster import LOCAL_ALL_REDUCE_FACTOR, LOCAL_BANDWIDTH, assumed_cluster, read_for
from pl_pipe.strategies.pipeline.settings import PipelineSettings

CPU = torch.device("cpu")
PROFILES = Path(__file__).parents[1] / "benchmarks" / "pipedream" / "profiles"
LIKE_VGG = {"conv1": Cost(40, 1), "conv2": Cost(25, 1), "conv3": Cost(25, 1), "head": Cost(30, 400)}
"""Uneven convolutions with few weights before a head with many."""
FEW_WEIGHTS = {"conv1": Cost(40, 1, 1), "conv2": Cost(25, 1, 1), "conv3": Cost(25, 1, 1), "head": Cost(30, 1)}
MANY_WEIGHTS = {name: Cost(30, 50) for name in ("one", "two", "three", "four")}
HEAVY_START = {"one": Cost(60, 1), "two": Cost(30, 100), "three": Cost(30, 100)}
HEAVY_MIDDLE = {"one": Cost(30, 100), "two": Cost(60, 1), "three": Cost(30, 100)}


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    def call(costs: Mapping[str, Cost], **settings: Any) -> Plan:
        monkeypatch.setattr(plan_choice, "profile", lambda *_, **__: chain_profile(costs))
        given = {"devices": 4, "device": CPU, "cache_folder": tmp_path / str(len(list(tmp_path.iterdir()))), **settings}
        return choose_plan(Chain(list(costs)), BATCH, **given)

    return call


# ---- plan=auto


@pytest.mark.parametrize(
    ("costs", "bandwidth", "shape", "step_ms"),
    [
        pytest.param(LIKE_VGG, 1e9, "3-1", 30, id="like VGG"),
        pytest.param(FEW_WEIGHTS, 1e9, "4", 30, id="data parallel"),
        pytest.param(MANY_WEIGHTS, 1e8, "1-1-1-1", 30, id="slow links"),
        pytest.param(HEAVY_START, 1e9, "2-1-1", 30, id="heavy start"),
        pytest.param(HEAVY_MIDDLE, 1e9, "1-2-1", 30, id="heavy middle"),
    ],
)
def test_auto_replicates_where_it_pays(
    choose: Callable[..., Plan], costs: Mapping[str, Cost], bandwidth: float, shape: str, step_ms: float
) -> None:
    plan = choose(costs, cluster=Cluster.flat(4, bandwidth))
    assert plan.shape == shape
    assert plan.predicted_step_s == pytest.approx(step_ms / 1e3)
    assert 0 in plan.stages[-1].ranks
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == [0, 1, 2, 3]


def test_straight_never_replicates(choose: Callable[..., Plan]) -> None:
    plan = choose(LIKE_VGG, plan="straight", cluster=Cluster.flat(4, 1e9))
    assert plan.shape == "1-1-1-1"
    assert plan.predicted_step_s == pytest.approx(0.040)


def test_more_devices_than_layers_are_used_by_auto(
    choose: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    costs = {"one": Cost(60, 1), "two": Cost(30, 100)}
    assert choose(costs, devices=3, cluster=Cluster.flat(3, 1e9)).shape == "2-1"
    assert "idle" not in caplog.text
    assert choose(costs, devices=3, plan="straight", cluster=Cluster.flat(3, 1e9)).shape == "1-1"
    assert "set devices=2" in caplog.text


def test_two_levels(choose: Callable[..., Plan]) -> None:
    """Inside a host links are quick: the weights that many share stay there."""
    cluster = Cluster.of_levels([2, 2], [1e10, 1e8])
    costs = {"one": Cost(40, 20), "two": Cost(20, 20), "three": Cost(40, 20), "four": Cost(20, 20)}
    plan = choose(costs, cluster=cluster)
    assert plan.shape == "2-2"
    assert [stage.ranks for stage in plan.stages] == [(2, 3), (0, 1)]
    straight = choose(costs, plan="straight", cluster=cluster)
    assert [stage.ranks for stage in straight.stages] == [(3,), (2,), (1,), (0,)]


def test_a_straight_plan_of_few_layers_on_two_levels(
    choose: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    costs = {"one": Cost(40), "two": Cost(20), "three": Cost(40)}
    plan = choose(costs, plan="straight", cluster=Cluster.of_levels([2, 2], [1e10, 1e9]))
    assert set(plan.replicas) == {1}
    assert 0 in plan.stages[-1].ranks
    assert "stay idle" in caplog.text


def test_what_does_not_fit_is_not_chosen(choose: Callable[..., Plan], caplog: pytest.LogCaptureFixture) -> None:
    free = choose(FEW_WEIGHTS, cluster=Cluster.flat(4, 1e9))
    assert free.shape == "4"
    narrow = choose(FEW_WEIGHTS, cluster=Cluster.flat(4, 1e9), memory_bytes=15e6)
    assert len(narrow.stages) > 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert choose(FEW_WEIGHTS, cluster=Cluster.flat(4, 1e9), memory_bytes=1e3) == free
    assert "no plan fits the 1.0 kB of a device, so the run may end for want of memory" in caplog.text


def test_a_straight_plan_keeps_within_the_memory_too(choose: Callable[..., Plan]) -> None:
    """The first of two stages keeps two versions of its weights, besides gradients and the optimizer's state."""
    costs = {"one": Cost(10, 10), "two": Cost(10, 10), "three": Cost(40, 1)}
    settings: dict[str, Any] = {"devices": 2, "plan": "straight", "cluster": Cluster.flat(2, 1e9)}
    assert [stage.modules for stage in choose(costs, **settings).stages] == [("one", "two"), ("three",)]
    narrow = choose(costs, memory_bytes=80e6, **settings)
    assert [stage.modules for stage in narrow.stages] == [("one",), ("two", "three")]


# ---- by hand


@pytest.mark.parametrize(
    ("split_points", "replicas", "ranks"),
    [
        (["conv3"], [3, 1], [(1, 2, 3), (0,)]),
        (["conv1"], [2, 2], [(2, 3), (0, 1)]),
        (["conv1", "conv3"], [1, 2, 1], [(3,), (1, 2), (0,)]),
        (None, [4], [(0, 1, 2, 3)]),
        ([], [4], [(0, 1, 2, 3)]),
    ],
)
def test_replicas_by_hand(
    choose: Callable[..., Plan], split_points: list[str] | None, replicas: list[int], ranks: list[tuple[int, ...]]
) -> None:
    plan = choose(LIKE_VGG, split_points=split_points, replicas=replicas)
    assert [stage.ranks for stage in plan.stages] == ranks
    assert plan.predicted_step_s == 0  # nothing was measured for it


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": [3, 1]}, r"replicas=\[3, 1\] is for 2 stages, but nothing says where they end; name 1 module"),
        ({"replicas": [2]}, r"replicas=\[2\] is for 2 devices, the trainer has 4; set devices=2, or numbers that add"),
        (
            {"split_points": ["conv1"], "replicas": [2, 1]},
            r"replicas=\[2, 1\] is for 3 devices, the trainer has 4; set devices=3",
        ),
        (
            {"split_points": ["conv1"], "replicas": [2, 1, 1]},
            r"split_points=\['conv1'\] makes 2 stages, but replicas=\[2, 1, 1\] is for 3; give one number for each",
        ),
        ({"split_points": ["conv1"], "replicas": [4, 0]}, r"replicas=\[4, 0\]; give each stage a number of devices"),
        ({"split_points": ["conv1"], "replicas": [2.0, 2]}, r"replicas=\[2.0, 2\]; give each stage a number of dev"),
        ({"replicas": []}, r"replicas=\[\]; give each stage a number of devices of 1 or more, such as \[3, 1\]"),
        ({"split_points": ["conv1"]}, r"makes 2 stages, the trainer has 4 .*, or name 3 modules, .*replicas=\[3, 1\]"),
        ({"plan": "straight", "replicas": [4]}, r"plan=straight and replicas=\[4\] each say how many devices a stage"),
        ({"plan": "straight", "split_points": ["conv1"]}, r"plan=straight and split_points=\['conv1'\] each say where"),
        ({"plan": "p.json", "replicas": [4]}, r"plan=p.json and replicas=\[4\] each say how many devices a stage has"),
    ],
)
def test_options_that_contradict(choose: Callable[..., Plan], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(LIKE_VGG, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": "3-1"}, r"replicas='3-1' is no list; give a number of devices for each stage, such as \[3, 1\]"),
        ({"replicas": 4}, r"replicas=4 is no list"),
        ({"plan": None}, r"plan=None; give auto, straight or the path of a plan.json"),
        ({"replicas": [3, 1]}, r"replicas=\[3, 1\] is for 2 stages, but nothing says where they end"),
        ({"plan": "p.json", "cluster": "probe"}, r"plan=p.json was made for a cluster .* cluster=probe would change"),
    ],
)
def test_options_are_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipeDreamStrategy(**settings)


def test_numpy_s_whole_numbers_are_numbers() -> None:
    strategy = PipeDreamStrategy(split_points=["conv1"], replicas=np.array([3, 1]))  # type: ignore[arg-type]
    assert [(type(count), count) for count in strategy.settings.replicas or ()] == [(int, 3), (int, 1)]


@pytest.mark.parametrize("split_points", [["conv3", "conv1"], ["conv1", "conv1"], [list(LIKE_VGG)[-1]]])
def test_split_points_out_of_order_are_told_in_modules(choose: Callable[..., Plan], split_points: list[str]) -> None:
    with pytest.raises(PlanError, match=rf"in execution order, each once.*run in the order {next(iter(LIKE_VGG))}, "):
        choose(LIKE_VGG, split_points=split_points, replicas=[1] * len(split_points) + [4 - len(split_points)])


def test_auto_takes_no_plan_that_the_simulator_finds_slow(
    choose: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    """By its busiest stage 2-1-1 takes 30 ms; but its replicas end together, and the next stage serves them in turn."""
    costs = {"a": Cost(30, 20), "b": Cost(30, 1), "c": Cost(30, 40), "d": Cost(10, 1)}
    cluster = Cluster.flat(4, 1e9)
    assert partition(chain_graph(costs), cluster=cluster).shape == "2-1-1"
    with caplog.at_level(logging.INFO):
        assert choose(costs, cluster=cluster).shape == "1-1-1-1"
    assert "2-1-1 is predicted to take 30 ms for a mini-batch, simulated 45 ms; 4 is taken: 31.6 ms" in caplog.text


# ---- from a file


def by_hand(costs: Mapping[str, Cost], *split_after: str, cluster: Cluster, replicas: list[int]) -> Plan:
    return split_by_hand(chain_graph(costs), cluster=cluster, split_after=split_after, replicas=replicas)


def with_ranks(plan: Plan, *ranks: tuple[int, ...]) -> Plan:
    return replace(plan, stages=tuple(replace(stage, ranks=own) for stage, own in zip(plan.stages, ranks, strict=True)))


def test_a_replicated_plan_is_read(choose: Callable[..., Plan], tmp_path: Path) -> None:
    plan = by_hand(LIKE_VGG, "conv3", cluster=Cluster.flat(4, 1e9), replicas=[3, 1])
    write_plan(plan, tmp_path / "plan.json")
    assert choose(LIKE_VGG, plan=str(tmp_path / "plan.json")) == plan
    with pytest.raises(PlanError, match=r"plan.json \(3-1\) is for 4 devices, the trainer has 2; set devices=4"):
        choose(LIKE_VGG, plan=str(tmp_path / "plan.json"), devices=2)


def test_ranks_are_renumbered_so_that_rank_0_is_last(choose: Callable[..., Plan], tmp_path: Path) -> None:
    plan = by_hand(LIKE_VGG, "conv3", cluster=Cluster.flat(4, 1e9), replicas=[3, 1])
    write_plan(with_ranks(plan, (0, 1, 2), (3,)), tmp_path / "plan.json")
    read = choose(LIKE_VGG, plan=str(tmp_path / "plan.json"))
    assert [stage.ranks for stage in read.stages] == [(1, 2, 3), (0,)]


def test_renumbering_keeps_hosts_together() -> None:
    cluster = Cluster.of_levels([2, 3], [1e10, 1e8])
    plan = by_hand(LIKE_VGG, "conv1", "conv2", cluster=cluster, replicas=[2, 2, 2])
    turned = with_ranks(plan, (0, 1), (2, 3), (4, 5))
    assert [stage.ranks for stage in with_rank_0_last(turned).stages] == [(4, 5), (2, 3), (0, 1)]
    across = with_ranks(plan, (0, 4), (1, 5), (2, 3))
    moved = with_rank_0_last(across)
    assert [stage.ranks for stage in moved.stages] == [(2, 4), (3, 5), (0, 1)]
    model = cost_model("overlap", activation_compression_ratio=None)
    prices = [stages_step_s(entry.stages, entry.transfers, cluster, model) for entry in (across, moved)]
    assert prices[0] == prices[1]
    assert with_rank_0_last(moved) is moved


def test_a_plan_that_cannot_be_renumbered_is_refused(choose: Callable[..., Plan], tmp_path: Path) -> None:
    """Three ranks on hosts of two: the last stage alone on the second host cannot change places with a pair."""
    plan = by_hand(LIKE_VGG, "conv3", cluster=Cluster.of_levels([2, 2], [1e10, 1e9]), replicas=[2, 1])
    write_plan(with_ranks(plan, (0, 1), (2,)), tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"uses rank 3, .* rank 0 must have the last stage, which moves the others; m"):
        choose(LIKE_VGG, plan=str(tmp_path / "plan.json"), devices=3)


# ---- the links


def test_links_that_nobody_measured(caplog: pytest.LogCaptureFixture) -> None:
    inside = Level(2, LOCAL_BANDWIDTH["gloo"], 0.0, LOCAL_ALL_REDUCE_FACTOR["gloo"])
    assert assumed_cluster(4) == Cluster((replace(inside, members=4),))
    assert not caplog.records
    assert assumed_cluster(4, nodes=2) == Cluster((inside, Level(2, 1.25e9)))
    assert "the network between 2 nodes was not measured" in caplog.text
    assert "set cluster=probe" in caplog.text
    assert assumed_cluster(2, nodes=2) == Cluster.flat(2, 1.25e9)
    (carried,) = assumed_cluster(4, backend="nccl").levels
    assert carried.bandwidth > inside.bandwidth
    assert carried.all_reduce_factor / carried.bandwidth == inside.all_reduce_factor / inside.bandwidth


def test_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"schema": 1, "levels": [{"members": 4, "bandwidth": 5e8, "all_reduce_factor": 3.0}]}')
    assert read_for(path, 4) == Cluster((Level(4, 5e8, 0.0, 3.0),))
    with pytest.raises(ConfigError, match=r"describes 4 workers, the trainer has 2 devices; set devices=4, or measure"):
        read_for(path, 2)
    with pytest.raises(ConfigError, match=r"none.json cannot be read"):
        read_for(tmp_path / "none.json", 2)


# ---- strategy=auto


def compared(
    costs: Mapping[str, Cost], *, workers: int = 4, bandwidth: float = 1e9, schedule: str = "pipedream",
    memory_bytes: float | None = None,
) -> Comparison:  # fmt: skip
    graph, cluster = chain_graph(costs), Cluster.flat(workers, bandwidth)
    return compare(
        graph,
        cluster=cluster,
        schedule=schedule,
        straight=lambda: partition(graph, cluster=cluster, straight=True, memory_bytes=memory_bytes),
        memory_bytes=memory_bytes,
    )


def test_every_way_is_priced() -> None:
    found = compared(LIKE_VGG)
    priced = [(way.name, way.plan and way.plan.shape, way.batches_an_update) for way in found.ways]
    assert priced == [
        ("one device", "1", 1),
        ("data parallel", "4", 4),
        ("pipeline, one device a stage", "1-1-1-1", 1),
        ("pipeline with replicas", "3-1", 3),
    ]
    assert [way.step_s for way in found.ways] == pytest.approx([0.12, 0.16, 0.04, 0.03], rel=0.01)
    assert found.chosen.name == "pipeline with replicas"
    assert found.plan.shape == "3-1"
    assert found.report == (
        "strategy=auto chose pipeline with replicas: 1.33 times as fast as the next best "
        "(pipeline, one device a stage)\n"
        "way                              plan  a mini-batch  batches an update\n"
        "one device                          1        120 ms                  1\n"
        "data parallel                       4        161 ms                  4\n"
        "pipeline, one device a stage  1-1-1-1         40 ms                  1\n"
        "pipeline with replicas            3-1         30 ms                  3  chosen"
    )


@pytest.mark.parametrize(
    ("costs", "bandwidth", "chosen"),
    [
        pytest.param(FEW_WEIGHTS, 1e9, "data parallel", id="few weights"),
        pytest.param(MANY_WEIGHTS, 1e8, "pipeline, one device a stage", id="many weights"),
        pytest.param({name: Cost(5, 50, 50) for name in "abcd"}, 1e8, "one device", id="slow links"),
    ],
)
def test_the_quickest_is_chosen(costs: Mapping[str, Cost], bandwidth: float, chosen: str) -> None:
    found = compared(costs, bandwidth=bandwidth)
    assert found.chosen.name == chosen
    assert found.chosen.step_s == min(way.step_s for way in found.ways)


def test_one_device_leaves_the_others_idle() -> None:
    plan = compared({name: Cost(5, 50, 50) for name in "abcd"}, bandwidth=1e8).plan
    assert [stage.ranks for stage in plan.stages] == [(0,)]


def test_a_pipeline_must_be_worth_it() -> None:
    """By 4 % it is not, by 8 % it is."""

    def with_weights(megabytes: float) -> Comparison:
        return compared({"one": Cost(30, megabytes), "two": Cost(30, megabytes)}, workers=2)

    slightly, clearly = with_weights(21.25), with_weights(22.5)
    assert slightly.chosen.name == "data parallel"
    assert slightly.ways[2].step_s < slightly.chosen.step_s
    assert "quicker by less than 5%, which is not worth it" in slightly.report
    assert clearly.chosen.name == "pipeline, one device a stage"


def test_what_a_flush_costs_is_counted() -> None:
    """Data parallel takes 36 ms, the pipeline 30 ms and nearly twice that with its bubbles."""
    costs = {name: Cost(30, 17.5) for name in "abcd"}
    assert compared(costs).chosen.name == "pipeline, one device a stage"
    flushed = compared(costs, schedule="gpipe")
    assert flushed.chosen.name == "data parallel"
    assert {way.batches_an_update for way in flushed.ways} == {1}


def test_a_flush_comes_with_every_batch_of_the_run() -> None:
    """Over 2-1-1 the strategy divides a batch into three rounds of two: they share GPipe's bubbles, and no more do."""
    plan = by_hand(LIKE_VGG, "conv1", "conv3", cluster=Cluster.flat(4, 1e9), replicas=[2, 1, 1])
    assert PipelineSettings(schedule="gpipe").microbatches(plan) == 6
    programs = build_programs(plan, schedule="gpipe", batches=10 * 6, accumulate=6)
    assert simulated_step_s(plan, "gpipe") == pytest.approx(simulate(plan, programs).step_s, rel=1e-6)


def test_ways_that_do_not_fit_are_not_chosen() -> None:
    found = compared(FEW_WEIGHTS, memory_bytes=15e6)
    assert [way.plan is None for way in found.ways] == [True, True, False, False]
    assert found.chosen.plan is not None
    assert len(found.chosen.plan.stages) > 1
    assert "does not fit 15.0 MB" in found.report
    with pytest.raises(
        PlanError, match=r"no way to train fits by estimate; .* more devices, or try strategy=pipedream"
    ):
        compared(FEW_WEIGHTS, memory_bytes=1e3)


def test_the_choice_is_told(choose: Callable[..., Plan], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan = choose(LIKE_VGG, plan="best", cluster=Cluster.flat(4, 1e9))
    assert plan.shape == "3-1"
    assert "strategy=auto chose pipeline with replicas" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"plan": "straight"},
            "strategy=auto chooses how to divide the model, but plan=straight does so too; leave it",
        ),
        ({"split_points": ["a"]}, r"split_points=\['a'\] does so too"),
        ({"replicas": [4]}, r"replicas=\[4\] does so too"),
        ({"schedul": "1f1b"}, "schedul='1f1b' is no option of"),
        ({"schedule": "dapple"}, "schedule=dapple is unknown"),
    ],
)
def test_what_auto_does_not_take(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AutoStrategy(**settings)


def test_auto_takes_the_options_of_a_pipeline() -> None:
    settings = AutoStrategy(schedule="1f1b", num_microbatches=2, cluster="probe").settings
    assert (settings.plan, settings.schedule, settings.num_microbatches, settings.cluster) == (
        "best",
        "1f1b",
        2,
        "probe",
    )


def test_of_plans_that_take_as_long_the_one_without_replicas_is_taken() -> None:
    """GNMT's published profile over 1 Gbit/s: 2-1-1 and 1-1-1-1 are simulated alike, and the second runs quicker."""
    graph, cluster = read_graph(PROFILES / "gnmt.graph.txt"), Cluster.flat(4, 0.955e9 / 8)
    replicated, straight = partition(graph, cluster=cluster), partition(graph, cluster=cluster, straight=True)
    assert (replicated.shape, straight.shape) == ("2-1-1", "1-1-1-1")
    assert quickest(replicated, [lambda: straight], schedule="pipedream") is straight
    assert quickest(straight, [lambda: replicated], schedule="pipedream") is straight


def test_ranks_that_never_vary_are_not_what_plans_are_compared_by() -> None:
    """VGG-16's published profile in four equal stages over 1 Gbit/s takes 3.5 to 3.7 s a mini-batch when it runs."""
    plan = split_evenly(read_graph(PROFILES / "vgg16.graph.txt"), cluster=Cluster.flat(4, 0.955e9 / 8))
    in_step = simulate(plan, build_programs(plan, schedule="pipedream", batches=48))
    assert in_step.step_s == pytest.approx(4.69, abs=0.01)
    assert simulated_step_s(plan, "pipedream") == pytest.approx(3.6, rel=0.05)
