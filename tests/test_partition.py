"""The partition optimizer against exhaustion, its two algorithms against each other, its limits and its refusals."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from brute_force import Question, best_s, crossing_bytes, stage_s
from hypothesis import given, settings
from hypothesis import strategies as st

from pl_pipe.cluster import Cluster, Level
from pl_pipe.errors import ConfigError, PlanError
from pl_pipe.graph import LayerGraph, LayerNode, ValueRead
from pl_pipe.partition import Plan, optimizer, partition, read_plan, split_by_hand, with_stages, write_plan
from pl_pipe.partition.cuts import cuts_of
from pl_pipe.partition.memory import stage_memory_bytes, waiting_batches


def layer(
    name: str, forward: float, backward: float, outputs: int, parameters: int, kept: int | None = None
) -> LayerNode:
    return LayerNode(name, f"Layer({name})", forward, backward, (outputs,), parameters, None, f"net.{name}", kept)


def chain(costs: list[tuple[float, float, int, int]]) -> LayerGraph:
    nodes = tuple(layer(f"n{index}", *cost) for index, cost in enumerate(costs))
    return LayerGraph(nodes, tuple((f"n{i}", f"n{i + 1}") for i in range(len(costs) - 1)))


def random_chain(count: int, seed: int = 0) -> LayerGraph:
    random = np.random.default_rng(seed)
    return chain(
        [
            (random.uniform(1, 5) / 1e3, random.uniform(1, 9) / 1e3, int(random.integers(1e4, 1e6)), int(p))
            for p in random.integers(0, 10_000_000, count)
        ]
    )


@st.composite
def graphs(draw: st.DrawFn, most: int = 6) -> LayerGraph:
    count = draw(st.integers(1, most))
    cost = st.integers(0, 20).map(lambda value: value / 1e3)
    nodes = tuple(
        layer(f"n{i}", draw(cost), draw(cost), draw(st.integers(0, 50)) * 1000, draw(st.integers(0, 50)) * 1000,
              draw(st.none() | st.integers(0, 50).map(lambda size: size * 1000)))
        for i in range(count)
    )  # fmt: skip
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=9)) if pairs else []
    if draw(st.booleans()):  # one after another, with what was drawn as skips
        edges = list(dict.fromkeys([*edges, *((i, i + 1) for i in range(count - 1))]))
    return LayerGraph(nodes, tuple((f"n{i}", f"n{j}") for i, j in edges))


speeds = st.sampled_from([1e5, 1e6, 1e7, 1e9])


def answer_s(question: Question) -> float:
    try:
        return partition(
            question.graph,
            cluster=question.cluster,
            cost_model=question.cost_model,
            activation_compression_ratio=question.ratio,
            straight=question.straight,
            use_fewer=question.use_fewer,
            memory_bytes=question.memory_bytes,
            optimizer_state_factor=question.optimizer_state_factor,
        ).predicted_step_s
    except PlanError:
        return math.inf


def same(left: float, right: float) -> bool:
    return left == right or math.isclose(left, right, rel_tol=1e-11, abs_tol=1e-15)


@settings(max_examples=150, deadline=None)
@given(
    graph=graphs(), workers=st.integers(1, 5), bandwidth=speeds, cost_model=st.sampled_from(["pipedream", "overlap"]),
    ratio=st.sampled_from([None, 1.0, 3.0]), straight=st.booleans(), use_fewer=st.booleans(),
)  # fmt: skip
def test_equals_exhaustion_on_one_level(
    graph: LayerGraph, workers: int, bandwidth: float, cost_model: str, ratio: float | None, straight: bool,
    use_fewer: bool,
) -> None:  # fmt: skip
    cluster = Cluster((Level(workers, bandwidth, all_reduce_factor=1.7),))
    question = Question(graph, cluster, cost_model, ratio, straight, use_fewer)
    assert same(answer_s(question), best_s(question))


@settings(max_examples=40, deadline=None)
@given(
    graph=graphs(most=4), members=st.tuples(st.integers(1, 3), st.integers(1, 3)), slow=speeds,
    ratio=st.sampled_from([None, 1.0]), use_fewer=st.booleans(), straight=st.booleans(),
)  # fmt: skip
def test_equals_exhaustion_on_two_levels(
    graph: LayerGraph, members: tuple[int, int], slow: float, ratio: float | None, use_fewer: bool, straight: bool
) -> None:
    """Prices composed level by level are the original's rule."""
    cluster = Cluster.of_levels(members, [1e8, slow])
    question = Question(graph, cluster, "pipedream", ratio, straight, use_fewer)
    assert same(answer_s(question), best_s(question))


@settings(max_examples=80, deadline=None)
@given(
    graph=graphs(), workers=st.integers(1, 4), bandwidth=speeds, cost_model=st.sampled_from(["pipedream", "overlap"]),
    memory_bytes=st.integers(1, 400).map(lambda size: size * 1000.0), use_fewer=st.booleans(), straight=st.booleans(),
)  # fmt: skip
def test_equals_exhaustion_under_a_memory_limit(
    graph: LayerGraph, workers: int, bandwidth: float, cost_model: str, memory_bytes: float, use_fewer: bool,
    straight: bool,
) -> None:  # fmt: skip
    cluster = Cluster.flat(workers, bandwidth)
    question = Question(graph, cluster, cost_model, 1.0, straight, use_fewer, memory_bytes)
    assert same(answer_s(question), best_s(question))


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(most=7), workers=st.integers(1, 70), bandwidth=speeds, straight=st.booleans(), use_fewer=st.booleans(),
    cost_model=st.sampled_from(["pipedream", "overlap"]), memory_bytes=st.none() | st.integers(1, 800).map(float),
)  # fmt: skip
def test_table_and_search_agree(
    graph: LayerGraph, workers: int, bandwidth: float, straight: bool, use_fewer: bool, cost_model: str,
    memory_bytes: float | None,
) -> None:  # fmt: skip
    question = Question(
        graph, Cluster.flat(workers, bandwidth), cost_model, 1.0, straight, use_fewer,
        memory_bytes and memory_bytes * 1000,
    )  # fmt: skip
    answers = []
    for table_s in (0.0, 1.0):  # what the optimizer believes the table would take: the search takes 0.5 s
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "seconds_of_table", lambda *_, table_s=table_s: table_s)
            patch.setattr(optimizer, "seconds_of_search", lambda *_: 0.5)
            answers.append(answer_s(question))
    assert same(*answers)


def test_the_search_leaves_nobody_idle_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are dear here, so one idle worker of three would help; memory lets the first layer wait for one more."""
    monkeypatch.setattr(optimizer, "seconds_of_table", lambda *_: 1.0)
    monkeypatch.setattr(optimizer, "seconds_of_search", lambda *_: 0.0)
    graph = chain([(0.1, 0.1, 1000, 10_000), (0.1, 0.1, 1000, 10_000)])
    limit = 2 * (10_000 + 1000 + 1000) + 3 * 10_000.0
    for use_fewer, fast in ((False, False), (True, True)):
        question = Question(graph, Cluster.flat(3, 1e4), "overlap", 1.0, False, use_fewer, limit)
        found = answer_s(question)
        assert same(found, best_s(question))
        assert (found < 0.3) is fast


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(), workers=st.integers(1, 5), bandwidth=speeds, cost_model=st.sampled_from(["pipedream", "overlap"])
)
def test_the_plan_has_the_price_it_says(graph: LayerGraph, workers: int, bandwidth: float, cost_model: str) -> None:
    """The stages of the plan, priced one by one from the statement of the cost model."""
    cluster = Cluster.flat(workers, bandwidth)
    plan = partition(graph, cluster=cluster, cost_model=cost_model, activation_compression_ratio=1.0)
    question = Question(graph, cluster, cost_model, 1.0)
    prices, done = [], frozenset[str]()
    for index, stage in enumerate(plan.stages):
        end = done | set(stage.nodes)
        prices.append(stage_s(question, cluster.levels[0], 1, stage.compute_s, done, end, stage.replicas, index == 0))
        done = end
    assert same(max(prices), plan.predicted_step_s)
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(workers))
    assert sorted(name for stage in plan.stages for name in stage.nodes) == sorted(node.name for node in graph.nodes)
    stage_of = {name: index for index, stage in enumerate(plan.stages) for name in stage.nodes}
    assert all(stage_of[a] <= stage_of[b] for a, b in graph.edges), "data flow onward"


def test_baselines() -> None:
    graph = chain([(1e-3, 2e-3, 1000, 10_000), (2e-3, 4e-3, 500, 20_000)])
    cluster = Cluster.flat(2, 1e6)
    plan = partition(graph, cluster=cluster, cost_model="pipedream", activation_compression_ratio=1.0)
    assert plan.single_device_step_s == pytest.approx(9e-3)
    assert plan.data_parallel_step_s == pytest.approx((9e-3 + 4 * 0.5 * 30_000 / 1e6) / 2)
    assert plan.uniform_step_s == pytest.approx(max(3e-3, 6e-3, 2 * 1000 / 1e6))
    overlap = partition(graph, cluster=cluster)
    assert overlap.data_parallel_step_s == pytest.approx(max(9e-3, 3e-3 + 30_000 / 1e6) / 2)
    assert partition(graph, cluster=Cluster.flat(3, 1e6)).uniform_step_s is None


def test_last_stage_stands_on_the_first_workers() -> None:
    graph = chain([(1e-3, 2e-3, 10, 10)] * 3)
    plan = partition(graph, cluster=Cluster.flat(3, 1e9), straight=True)
    assert [stage.ranks for stage in plan.stages] == [(2,), (1,), (0,)]


def test_two_levels_keep_replicas_of_a_host_together() -> None:
    """Two hosts of two: a straight pipeline inside each host, the hosts as replicas of each other."""
    graph = chain([(1e-3, 1e-3, 10, 4_000_000), (1e-3, 1e-3, 10, 4_000_000)])
    plan = partition(graph, cluster=Cluster.of_levels([2, 2], [1e8, 1e12]))
    assert [stage.ranks for stage in plan.stages] == [(1, 3), (0, 2)]
    assert plan.predicted_step_s == pytest.approx(1e-3)


def test_skips_are_passed_on_by_the_nearest_stage_that_has_them() -> None:
    """n0 feeds n1, n2 and n3; each stands on a stage of its own."""
    nodes = tuple(layer(f"n{i}", 1e-3, 1e-3, 10 * (i + 1), 5) for i in range(4))
    graph = LayerGraph(nodes, (("n0", "n1"), ("n1", "n2"), ("n2", "n3"), ("n0", "n2"), ("n0", "n3")))
    plan = partition(graph, cluster=Cluster.flat(4, 1e9), straight=True)
    assert {(t.source, t.target): t.size_bytes for t in plan.transfers} == {
        (0, 1): 10,
        (1, 2): 20 + 10,
        (2, 3): 30 + 10,
    }


def test_inputs_join_their_first_user_and_cost_nothing() -> None:
    nodes = (
        LayerNode("x", "Input0", 5.0, 0.0, (10**9,), 0),
        layer("a", 1e-3, 1e-3, 10, 10),
        LayerNode("y", "Input1", 5.0, 0.0, (10**9,), 0),
        layer("b", 1e-3, 1e-3, 10, 10),
        LayerNode("s", "__getitem__(0)", 1.0, 0.0, (10**9,), 0),
    )
    graph = LayerGraph(nodes, (("x", "a"), ("a", "b"), ("y", "b"), ("a", "s")))
    plan = partition(graph, cluster=Cluster.flat(2, 1e9), straight=True)
    assert [stage.nodes for stage in plan.stages] == [("x", "a", "s"), ("y", "b")]
    assert plan.single_device_step_s == pytest.approx(4e-3)
    assert [t.size_bytes for t in plan.transfers] == [10]


def test_memory_under_overlap_counts_versions_optimizer_and_batches_in_flight() -> None:
    graph = chain([(1e-3, 1e-3, 100, 1000)] * 4)
    received = [0, 100, 100, 100]
    need = [(4 - i) * (1000 + 100 + received[i]) + 3 * 1000 for i in range(4)]  # straight: 4 - i batches in flight
    plan = partition(graph, cluster=Cluster.flat(4, 1e9), straight=True, memory_bytes=max(need))
    held = [
        stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=2.0)
        for stage, waiting in zip(plan.stages, waiting_batches(plan.stages), strict=True)
    ]
    assert held == need
    with pytest.raises(PlanError, match=r"no plan for 4 workers .* every layer fits by itself .* n\d \(net.n\d\)"):
        partition(graph, cluster=Cluster.flat(4, 1e9), straight=True, memory_bytes=max(need) - 1)


def test_memory_is_kept_over_several_levels() -> None:
    """An inner level cannot see the stages that follow in the outer one; the plan as a whole is checked."""
    graph = random_chain(12)
    cluster = Cluster.of_levels([2, 4], [1e12, 1e7])
    free = partition(graph, cluster=cluster)
    most = max(
        stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=2.0)
        for stage, waiting in zip(free.stages, waiting_batches(free.stages), strict=True)
    )
    plan = partition(graph, cluster=cluster, memory_bytes=0.8 * most)
    for stage, waiting in zip(plan.stages, waiting_batches(plan.stages), strict=True):
        assert stage_memory_bytes(stage, waiting=waiting, optimizer_state_factor=2.0) <= 0.8 * most
    assert plan.predicted_step_s >= free.predicted_step_s


@pytest.mark.parametrize("members", [[16], [8, 2], [4, 4], [2, 8], [2, 2, 4]])
def test_levels_with_equal_links_make_no_difference(members: list[int]) -> None:
    """One layer on 16 workers takes what a ring of 16 takes, however the workers are grouped."""
    graph = chain([(1e-3, 2e-3, 0, 100_000_000)])
    plan = partition(graph, cluster=Cluster.of_levels(members, [1e9] * len(members)))
    expected = (1e-3 + 2 * 15 / 16 * 1e8 / 1e9) / 16
    assert plan.data_parallel_step_s == pytest.approx(expected, rel=1e-12)
    assert plan.predicted_step_s == pytest.approx(expected, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), members=st.tuples(st.integers(1, 4), st.integers(1, 3)), slow=speeds, use_fewer=st.booleans())
def test_a_plan_on_levels_has_the_price_of_its_busiest_resource(
    graph: LayerGraph, members: tuple[int, int], slow: float, use_fewer: bool
) -> None:
    """Stage by stage and port by port, from the statement in the documents."""
    cluster = Cluster.of_levels(members, [1e8, slow])
    plan = partition(graph, cluster=cluster, use_fewer=use_fewer)
    ports: dict[tuple[int, int], float] = {}
    prices, done = [], frozenset[str]()
    for index, stage in enumerate(plan.stages):
        end = done | set(stage.nodes)
        own = max(cluster.meeting_level([a, b]) for a in stage.ranks for b in stage.ranks)
        r, link = stage.replicas, cluster.levels[own]
        reduce_s = 2 * (r - 1) / r * stage.parameter_bytes / link.bandwidth
        prices.append(max(stage.compute_s, stage.forward_s + reduce_s) / r)
        for size, other in ((crossing_bytes(graph, done), -1), (crossing_bytes(graph, end), 1)):
            if 0 <= index + other < len(plan.stages):
                level = cluster.meeting_level((*stage.ranks, *plan.stages[index + other].ranks))
                hosts = {rank // (members[0] if level else 1) for rank in stage.ranks}
                for host in hosts:
                    key = (level, host)
                    ports[key] = ports.get(key, 0.0) + size / cluster.levels[level].bandwidth / len(hosts)
        for host in {rank // (members[0] if own else 1) for rank in stage.ranks}:
            ports[own, host] = ports.get((own, host), 0.0) + reduce_s / r
        done = end
    assert same(plan.predicted_step_s, max(*prices, *ports.values()))
    assert plan.predicted_step_s <= plan.data_parallel_step_s * (1 + 1e-12)


def test_memory_that_nothing_fits_in_names_the_layer_and_what_is_missing() -> None:
    graph = chain([(1e-3, 1e-3, 100, 1000), (1e-3, 1e-3, 100, 5_000_000)])
    with pytest.raises(
        PlanError, match=r"n1 \(net\.n1\) alone needs 20\.0 MB, 19\.0 MB more.*least.*memory_bytes=2\.\d+e\+07"
    ):
        partition(graph, cluster=Cluster.flat(2, 1e9), memory_bytes=1e6)


def test_a_plan_survives_its_file(tmp_path) -> None:
    plan = partition(random_chain(9), cluster=Cluster.of_levels([2, 2], [1e10, 1e8]))
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a plan of schema 1"),
        ('{"schema": 7}', r"schema: 7"),
        ('{"schema": 1}', "cannot be read as a plan"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, text: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=message):
        read_plan(tmp_path / "plan.json")


def test_a_plan_for_another_model_is_refused() -> None:
    plan = partition(random_chain(4), cluster=Cluster.flat(2, 1e9))
    plan.check_fits(random_chain(4))
    with pytest.raises(
        PlanError, match=r"stage 0 of the plan has \d+ bytes of parameters, the model's layers of these"
    ):
        plan.check_fits(random_chain(4, seed=1))  # as many layers, but others
    with pytest.raises(PlanError, match=r"the model has layers that the plan does not name: n4 \(1 in all\)"):
        plan.check_fits(random_chain(5))
    with pytest.raises(PlanError, match=r"names layers that the model does not have: n3"):
        plan.check_fits(random_chain(3))


def changed(plan: Plan, **stage) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], **stage), *plan.stages[1:]))


def test_impossible_plans_are_refused() -> None:
    plan = partition(chain([(1e-3, 1e-3, 1, 1)] * 2), cluster=Cluster.flat(2, 1e9), straight=True)
    with pytest.raises(PlanError, match="two stages"):
        changed(plan, ranks=(0,))
    with pytest.raises(PlanError, match="rank 5, but the cluster has 2"):
        changed(plan, ranks=(5,))
    with pytest.raises(PlanError, match="forward_s=nan"):
        changed(plan, forward_s=math.nan)
    with pytest.raises(PlanError, match="0 layers"):
        changed(plan, nodes=())
    with pytest.raises(PlanError, match="no stages"):
        replace(plan, stages=())
    with pytest.raises(PlanError, match="onward"):
        replace(plan, transfers=(replace(plan.transfers[0], source=1, target=0),))


def test_more_workers_than_layers_in_a_straight_pipeline() -> None:
    graph = chain([(1e-3, 1e-3, 1, 1)] * 3)
    with pytest.raises(PlanError, match=r"5 workers and 3 layers; set plan.use_fewer=true, or plan for 3 workers"):
        partition(graph, cluster=Cluster.flat(5, 1e9), straight=True)
    assert partition(graph, cluster=Cluster.flat(5, 1e9), straight=True, use_fewer=True).shape == "1-1-1"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"cost_model": "magic"}, "choose one of pipedream, overlap"),
        ({"activation_compression_ratio": 0.0}, "not a positive number"),
        ({"memory_bytes": -1.0}, "not a positive number of bytes"),
        ({"memory_bytes": math.nan}, "not a positive number of bytes"),
        ({"optimizer_state_factor": math.nan}, "optimizer_state_factor=nan is not 0 or more"),
    ],
)
def test_wrong_settings(settings_: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(random_chain(3), cluster=Cluster.flat(2, 1e9), **settings_)


def test_wrong_clusters() -> None:
    with pytest.raises(ConfigError, match=r"2 levels of workers .* but 1 bandwidths"):
        Cluster.of_levels([4, 2], [1e9])
    for wrong in ({"members": 0}, {"bandwidth": 0.0}, {"bandwidth": math.nan}, {"latency_s": -1.0}):
        with pytest.raises(ConfigError):
            Level(**{"members": 2, "bandwidth": 1e9, **wrong})


def test_by_hand_is_priced_as_the_optimizer_prices() -> None:
    """A split that the optimizer found, given back by hand, has the same price."""
    graph = random_chain(8, seed=3)
    for cost_model in ("pipedream", "overlap"):
        found = partition(graph, cluster=Cluster.flat(6, 1e9), cost_model=cost_model, activation_compression_ratio=1.0)
        by_hand = split_by_hand(
            graph, cluster=Cluster.flat(6, 1e9), cost_model=cost_model, activation_compression_ratio=1.0,
            split_after=[stage.nodes[-1] for stage in found.stages[:-1]], replicas=found.replicas,
        )  # fmt: skip
        assert same(by_hand.predicted_step_s, found.predicted_step_s)
        assert replace(by_hand, predicted_step_s=found.predicted_step_s) == found


def test_by_hand_takes_modules_and_containers() -> None:
    nodes = tuple(
        replace(layer(f"n{i}", 1e-3, 1e-3, 10, 10), module=f"features.{i}" if i < 3 else "head") for i in range(4)
    )
    graph = LayerGraph(nodes, (("n0", "n1"), ("n1", "n2"), ("n2", "n3")))
    for name in ("n2", "features.2", "features"):
        plan = split_by_hand(graph, cluster=Cluster.flat(4, 1e9), split_after=[name], replicas=[3, 1])
        assert [stage.nodes for stage in plan.stages] == [("n0", "n1", "n2"), ("n3",)]
        assert [stage.ranks for stage in plan.stages] == [(1, 2, 3), (0,)]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"split_after": ["n9"]}, r"names n9, which is no layer or module .* that it has: net.n0, net.n1"),
        ({"split_after": ["n1", "n0"]}, "in execution order"),
        ({"split_after": ["n3"]}, "none that ends with the model; they run in the order net.n0, net.n1"),
        ({"split_after": ["n0"], "replicas": [1]}, r"makes 2 stages, but plan.replicas=\[1\]"),
        ({"split_after": ["n0"], "replicas": [0, 1]}, "1 or more"),
        ({"split_after": ["n0"], "replicas": [4, 1]}, r"needs 5 workers, the cluster has 4; set cluster.devices=5"),
        (
            {"split_after": ["n0"], "memory_bytes": 30.0},
            r"stage 0 \(n0 … n0, 1 replicas, 2 mini-batches in flight\) needs",
        ),
    ],
)
def test_wrong_splits_by_hand(settings_: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_by_hand(chain([(1e-3, 1e-3, 10, 10)] * 4), cluster=Cluster.flat(4, 1e9), **settings_)


def test_no_cut_where_a_value_read_would_need_an_earlier_stage() -> None:
    """n0 -> n1 -> n2 -> n3 with a skip n0 -> n3; after n2 the step reads a value of n1.

    Cut after n0: stage 0 cannot know the value, is done at the read, and yet n3 needs n0's output after it.
    """
    plain = chain([(1e-3, 1e-3, 10, 10)] * 4)
    skip = replace(plain, edges=(*plain.edges, ("n0", "n3")))
    graph = replace(skip, reads=(ValueRead("n1", "n2", "model.py:17"),))
    cluster = Cluster.flat(2, 1e9)
    with pytest.raises(
        PlanError, match=r"after n0 cannot work: model.py:17 reads a value .*n0 .* used after that read"
    ):
        split_by_hand(graph, cluster=cluster, split_after=["n0"])
    split_by_hand(graph, cluster=cluster, split_after=["n1"])
    split_by_hand(replace(plain, reads=graph.reads), cluster=cluster, split_after=["n0"])  # nothing is needed later
    assert len(cuts_of(graph)) == len(cuts_of(skip)) - 1
    first_heavy = replace(graph, nodes=(layer("n0", 1.0, 1.0, 10, 10), *graph.nodes[1:]))
    assert partition(first_heavy, cluster=cluster, straight=True).stages[0].nodes == ("n0", "n1")


def branches(blocks: int, width: int, depth: int) -> LayerGraph:
    """Inception-like: blocks of `width` branches of `depth` layers between two layers that all paths pass."""
    random = np.random.default_rng(0)
    nodes, edges, last = [], [], None
    for block in range(blocks):
        ends = []
        for branch in range(width):
            previous = last
            for step in range(depth):
                name = f"b{block}_{branch}_{step}"
                nodes.append(layer(name, random.uniform(1, 5) / 1e3, random.uniform(1, 5) / 1e3, 1000, 1000))
                if previous is not None:
                    edges.append((previous, name))
                previous = name
            ends.append(previous)
        last = f"join{block}"
        nodes.append(layer(last, 1e-4, 1e-4, 1000, 0))
        edges += [(end, last) for end in ends]
    return LayerGraph(tuple(nodes), tuple(edges))


def test_all_cuts_of_small_blocks_are_considered_and_large_ones_are_put_in_order() -> None:
    small = branches(blocks=2, width=2, depth=3)
    assert (len(cuts_of(small)), cuts_of(small).ordered) == (2 * (4 * 4 - 1) + 2 + 1, 0)
    large = branches(blocks=2, width=6, depth=6)
    assert (len(cuts_of(large)), cuts_of(large).ordered) == (2 * 36 + 2 + 1, 2 * 36)
    bounded = cuts_of(large, 20)
    assert len(bounded) <= 21
    assert bounded.holds_SN[-1].all()
    assert not bounded.holds_SN[0].any()


def test_cuts_hold_what_their_layers_depend_on() -> None:
    graph = branches(blocks=3, width=3, depth=3)
    cuts = cuts_of(graph)
    number = {node.name: index for index, node in enumerate(cuts.layers)}
    for source, target in graph.edges:
        assert (cuts.holds_SN[:, number[source]] | ~cuts.holds_SN[:, number[target]]).all()
    for index in range(0, len(cuts), 7):
        held = frozenset(name for name, at in number.items() if cuts.holds_SN[index, at])
        assert cuts.crossing_bytes_S[index] == crossing_bytes(graph, held)


def test_graphs_with_too_many_cuts_end_in_good_time() -> None:
    """Bounded work, not a benchmark: without the bound this would not end at all."""
    began = time.monotonic()
    plan = partition(branches(blocks=12, width=10, depth=10), cluster=Cluster.flat(8, 1e9))
    assert time.monotonic() - began < 60
    assert plan.ranks == 8
    ideal_s = plan.single_device_step_s / 8
    assert plan.predicted_step_s < 1.25 * ideal_s


def test_stages_are_written_into_the_graph() -> None:
    graph = random_chain(6)
    plan = partition(graph, cluster=Cluster.flat(3, 1e9), straight=True)
    marked = with_stages(graph, plan)
    assert [node.stage for node in marked.nodes] == sorted(node.stage for node in marked.nodes)
    assert {node.stage for node in marked.nodes} == {0, 1, 2}
