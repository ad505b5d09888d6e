"""Recorded compute: sleeping layers with the times and sizes of a profile, planned by it and run by any strategy."""

import logging
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Inside
from pipedream_farm import Farm, Order
from recorded_tasks import BATCH_SIZE
from torch import Tensor

import pl_pipe
from pl_pipe.cluster import Cluster
from pl_pipe.errors import ConfigError, GraphError, PlanError, PlPipeError
from pl_pipe.graph import LayerGraph, LayerNode, Profile, Spread, format_graph, read_graph, write_profile
from pl_pipe.partition import Plan, partition, split_evenly, write_plan
from pl_pipe.recipes.recorded.layers import RecordedLayer
from pl_pipe.recipes.recorded.module import RecordedModel
from pl_pipe.strategies.pipeline import plan_choice
from pl_pipe.strategies.pipeline.plan_choice import choose_plan
from pl_pipe.strategies.pipeline.plan_comparison import simulated_step_s

pytest_plugins = "pipedream_plugin"

CPU = torch.device("cpu")
BATCH = torch.arange(BATCH_SIZE)


def node(name: str, ms: float, output: int | tuple[int, ...], parameters: int = 0, description: str = "L") -> LayerNode:
    outputs = output if isinstance(output, tuple) else (output,)
    return LayerNode(name, description, ms / 1e3, 2 * ms / 1e3, outputs, parameters)


SKIP = LayerGraph(
    (
        node("node1", 9.0, 640, description="Input0"),
        node("node2", 2.0, 1600, 4000),
        node("node3", 1.0, 800),
        node("node4", 3.0, (400, 1200), 8000),
        node("node5", 0.0, 1600, description="Add"),
        node("node6", 2.0, 320, 40_000),
        node("node7", 0.0, 64, description="__getitem__(1)"),
    ),
    tuple((f"node{a}", f"node{b}") for a, b in ((1, 2), (2, 3), (3, 4), (4, 5), (2, 5), (5, 6), (4, 7))),
)
"""A batch, five layers with a skip from the second over the third and fourth, and a selection that nobody uses."""
TEXT = format_graph(SKIP)
LAYERS = [layer for layer in SKIP.nodes if not layer.is_input]


def recorded(folder: Path, graph: LayerGraph = SKIP, **settings: Any) -> RecordedModel:
    path = folder / "graph.txt"
    path.write_text(format_graph(graph))
    return RecordedModel(str(path), **{"dilation": 1.0, "batch_size": BATCH_SIZE, **settings})


# ---- the model


def test_a_profile_of_the_model_is_the_record_again(tmp_path: Path) -> None:
    found = pl_pipe.profile(recorded(tmp_path, dilation=2.0), BATCH, repeats=1, warmup=0).graph
    layers = {entry.module.removeprefix("layers."): entry for entry in found.nodes if entry.module}
    assert list(layers) == [layer.name for layer in LAYERS]
    for layer in LAYERS:
        measured = layers[layer.name]
        assert measured.total_output_bytes == layer.total_output_bytes
        assert measured.parameter_bytes == layer.parameter_bytes
        assert measured.forward_s >= 2 * layer.forward_s * 0.9
        assert measured.backward_s >= 2 * layer.backward_s * 0.9
    names = {entry.name: name for name, entry in layers.items()}
    edges = {(names[a], names[b]) for a, b in found.edges if a in names and b in names}
    assert edges == {edge for edge in SKIP.edges if edge[0] != "node1"}


def test_a_part_of_the_batch_takes_its_share_of_time_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[float] = []
    monkeypatch.setattr(RecordedLayer, "rest", lambda _layer, _start_s, wanted_s: wanted.append(wanted_s))
    output = RecordedLayer(node("node2", 40.0, 1600), dilation=1.0, batch_size=BATCH_SIZE)(BATCH_SIZE // 4, BATCH)
    output.sum().backward()
    assert wanted == pytest.approx([0.01, 0.02])
    assert output.nbytes == 400
    costs = recorded(tmp_path, dilation=3.0).pl_pipe_layer_costs(BATCH[:2])
    assert costs.graph.by_name["node4"].forward_s == pytest.approx(3 * 3e-3 / 4)
    assert costs.graph.by_name["node4"].total_output_bytes == 400


def test_gradients_come_layer_by_layer_while_backward_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that data parallel training sends the first ones while the others are still to come."""
    happened: list[str] = []
    rest = RecordedLayer.rest

    def noted(layer: RecordedLayer, start_s: float, wanted_s: float) -> None:
        happened.append(layer.node_name)
        rest(layer, start_s, wanted_s)

    model = recorded(tmp_path)
    model.log = lambda *_, **__: None  # type: ignore[assignment,method-assign]
    monkeypatch.setattr(RecordedLayer, "rest", noted)
    for name, parameter in model.named_parameters():

        def came(tensor: Tensor, name: str = name) -> None:
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape
            happened.append(name)

        parameter.register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
    loss = model.training_step(BATCH, 0)
    assert sorted(happened) == [layer.name for layer in LAYERS]
    happened.clear()
    loss.backward()  # type: ignore[no-untyped-call]
    assert happened == [
        *("node6", "layers.node6.weight", "node5", "node4", "layers.node4.weight"),
        *("node3", "node2", "layers.node2.weight"),
    ]


def test_weights_and_gradients_take_no_memory_before_they_are_touched() -> None:
    """138 million parameters are no reason to wait, nor for a machine to have their memory."""
    resident = _resident_bytes()
    layer = RecordedLayer(node("node2", 0.0, 1 << 30, 1 << 30), dilation=1.0, batch_size=1)
    layer(1, BATCH).sum().backward()
    assert layer.weight is not None
    assert layer.weight.grad is not None
    assert layer.weight.grad.nbytes == 1 << 30
    assert _resident_bytes() - resident < 1 << 28


def test_an_output_that_several_layers_take_is_not_added_up() -> None:
    """Autograd adds the gradients of a skip, which would be real work on as many numbers as it has."""
    layers = [RecordedLayer(node(f"node{n}", 0.0, 1 << 30, 4), dilation=1.0, batch_size=1) for n in range(4)]
    resident = _resident_bytes()
    start = layers[0](1, BATCH)
    seen: list[int] = []
    start.register_hook(lambda _: seen.append(_resident_bytes()))
    layers[3](1, layers[1](1, start), layers[2](1, start)).sum().backward()
    assert max(seen) - resident < 1 << 28
    assert all(layer.weight.grad is not None for layer in layers if layer.weight is not None)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_work_that_takes_longer_than_the_record_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = RecordedLayer(node("node2", 10.0, 4), dilation=1.0, batch_size=1)
    RecordedLayer.said_late = False
    with caplog.at_level(logging.WARNING, logger="pl_pipe"):
        layer.rest(time.perf_counter() - 0.5, 0.0)
        assert not caplog.records, "no dilation helps a layer of 0 s"
        layer.rest(time.perf_counter() - 0.5, 0.1)
        layer.rest(time.perf_counter() - 0.5, 0.1)
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert "layer node2 took" in message
    assert "the record says 100 ms" in message
    assert "recipe.dilation" in message


def test_the_run_says_what_a_link_must_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("pl_pipe.recipes.recorded.module.rank_zero_info", said.append)
    recorded(tmp_path, dilation=20.0).on_fit_start()
    (message,) = said
    assert "a link of 10 Gbit/s is one of 500 Mbit/s here" in message
    assert "a step of 1 s stands for 50 ms" in message


# ---- its plan


def head_heavy() -> LayerGraph:
    """Most time in front, unevenly, and most weights behind: a 3-1 on slow links."""
    times_ms = {1: 120.0, 2: 90.0, 3: 90.0, 4: 33.0}
    layers = [node(f"node{n}", ms, 1000, 1000 if n < 4 else 40_000_000) for n, ms in times_ms.items()]
    batch = node("node0", 5.0, 640, description="Input0")
    return LayerGraph((batch, *layers), tuple((f"node{n}", f"node{n + 1}") for n in range(4)))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("a recorded model is not to be measured")

    monkeypatch.setattr(plan_choice, "profile", measured)
    monkeypatch.setattr(plan_choice, "record_step", measured)


def assert_same_plan(training: Plan, planned: Plan, *, dilation: float) -> None:
    assert [stage.nodes for stage in training.stages] == [stage.nodes for stage in planned.stages]
    assert [stage.ranks for stage in training.stages] == [stage.ranks for stage in planned.stages]
    assert training.transfers == planned.transfers
    assert training.predicted_step_s == pytest.approx(dilation * planned.predicted_step_s)
    assert training.cluster.levels[0].bandwidth == pytest.approx(planned.cluster.levels[0].bandwidth / dilation)
    for stage in training.stages:
        placed = {module.removeprefix("layers.") for module in stage.modules}
        assert placed
        assert set(stage.nodes) - placed <= {"node0", "node1", "node2", "node3"}, "only inputs are no modules"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("plan", ["auto", "straight", "file"])
def test_training_uses_the_plan_of_the_profile(tmp_path: Path, plan: str) -> None:
    graph, links = head_heavy(), Cluster.flat(4, 2e7)
    planned = partition(graph, cluster=links, straight=plan == "straight")
    assert planned.shape == ("1-1-1-1" if plan == "straight" else "3-1")
    model = recorded(tmp_path, graph, dilation=20.0)
    settings: dict[str, Any] = {"plan": plan, "cluster": Cluster.flat(4, 1e6)}
    if plan == "file":
        write_plan(planned, tmp_path / "plan.json")
        settings = {"plan": str(tmp_path / "plan.json")}
    training = choose_plan(model, BATCH, devices=4, device=CPU, **settings)
    assert_same_plan(training, planned, dilation=20.0)
    assert {module for stage in training.stages for module in stage.modules} == {f"layers.node{n}" for n in range(1, 5)}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", ["vgg16", "resnet50", "gnmt"])
def test_published_profiles_are_trained_by_their_own_plans(name: str) -> None:
    data = Path(os.environ.get("PL_PIPE_TEST_DATA", ROOT.parent / "shared" / "data"))
    file = data / "pipedream" / f"{name}.graph.txt"
    if not file.is_file():
        pytest.skip(f"no {name}.graph.txt; set PL_PIPE_TEST_DATA to the folder that holds pipedream/")
    cluster = Cluster.flat(4, 1.25e9)
    planned = partition(read_graph(file), cluster=cluster)
    if name == "gnmt":  # where few mini-batches in flight cannot hide the links, more even loads on them are quicker
        even = split_evenly(read_graph(file), cluster=cluster)
        assert even.predicted_step_s > planned.predicted_step_s
        assert simulated_step_s(even, "pipedream") < 0.98 * simulated_step_s(planned, "pipedream")
        planned = even
    model = RecordedModel(str(file), dilation=20.0, batch_size=BATCH_SIZE)
    training = choose_plan(model, BATCH, devices=4, device=CPU, cluster=Cluster.flat(4, 1.25e9 / 20))
    assert_same_plan(training, planned, dilation=20.0)
    sizes = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes == read_graph(file).parameter_bytes


def test_a_profile_of_ours_is_rehearsed_by_its_own_plan(tmp_path: Path) -> None:
    """One that names modules, operations and shared weights, which here are all layers that can stand anywhere."""
    graph = head_heavy()
    named = replace(graph, nodes=tuple(replace(n, module="" if n.is_input else f"net.{n.name}") for n in graph.nodes))
    times = {n.name: Spread((0.0, 0.0), (0.0, 0.0)) for n in named.nodes}
    kept = Profile(named, "Net", "cpu", "float32", (), "2", 1, 0.3, None, times)
    write_profile(kept, tmp_path / "profile.json")
    model = RecordedModel(str(tmp_path / "profile.json"), dilation=20.0, batch_size=BATCH_SIZE)
    planned = partition(named, cluster=Cluster.flat(4, 2e7))
    write_plan(planned, tmp_path / "plan.json")
    training = choose_plan(model, BATCH, devices=4, device=CPU, plan=str(tmp_path / "plan.json"))
    assert_same_plan(training, planned, dilation=20.0)


def test_a_plan_of_another_record_is_refused(tmp_path: Path) -> None:
    write_plan(partition(head_heavy(), cluster=Cluster.flat(2, 1e6)), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="names no module"):
        choose_plan(recorded(tmp_path), BATCH, devices=2, device=CPU, plan=str(tmp_path / "plan.json"))


# ---- its training


def slept(rank: dict[str, Any]) -> Counter[str]:
    """How often each layer slept for its forward; those without any time too."""
    return Counter(name for name, _ in rank["slept"])


@pytest.mark.parametrize(
    "job",
    [
        Order("recorded_tasks.fit", ranks=2, graph=TEXT, strategy={"split_points": ["node3"], **settings})
        for settings in (
            {"schedule": "pipedream"},
            {"schedule": "1f1b", "num_microbatches": 2},
            {"schedule": "gpipe", "num_microbatches": 2},
            {"schedule": "pipedream_2bw", "num_microbatches": 2},
        )
    ],
    ids=["pipedream", "1f1b", "gpipe", "2bw"],
)
def test_layers_sleep_where_they_stand_and_their_bytes_travel(farm: Farm, job: Order) -> None:
    last, first = farm.start(job).outcome
    parts = job.options["strategy"].get("num_microbatches", 1)
    assert set(slept(first)) == {"node2", "node3"}
    assert set(slept(last)) == {"node4", "node5", "node6", "node7"}
    assert slept(last)["node6"] == slept(first)["node2"] == 2 * 6 * parts
    assert first["sent"] == [(0, 1, 800 // parts), (0, 1, 1600 // parts)] * (6 * parts)
    assert Counter(last["sent"]) == Counter([(1, 0, 800 // parts), (1, 0, 1600 // parts)] * (6 * parts))
    assert {wanted for name, wanted in last["slept"] if name == "node4"} == {3e-3 / parts, 6e-3 / parts}


@pytest.mark.parametrize(
    "job",
    [
        Order("recorded_tasks.fit", ranks=4, graph=format_graph(head_heavy()), dilation=0.02, bandwidth=1e9,
              strategy={"plan": "auto", "cluster": "cluster.json"}),
    ],
    ids=["3-1"],
)  # fmt: skip
def test_replicas_take_turns_and_nothing_is_measured(farm: Farm, job: Order) -> None:
    ranks = farm.start(job).outcome
    assert {rank["plan"].shape for rank in ranks} == {"3-1"}
    assert [rank["measured"] for rank in ranks] == [0] * 4
    assert slept(ranks[0])["node4"] == 2 * 6
    assert [slept(rank)["node1"] for rank in ranks[1:]] == [4, 4, 4]


@pytest.mark.parametrize("job", [Order("recorded_tasks.fit", ranks=2, graph=TEXT, strategy="ddp")], ids=["ddp"])
def test_data_parallel_ranks_share_the_batches(farm: Farm, job: Order) -> None:
    for rank in farm.start(job).outcome:
        assert rank["steps"] == 3
        assert slept(rank) == Counter({**dict.fromkeys([f"node{n}" for n in range(2, 7)], 6), "node7": 3})


# ---- bad input

CYCLE = TEXT + "\n\tnode6 -- node2"
IDLE = format_graph(LayerGraph((node("node1", 0.0, 4, 8), node("node2", 0.0, 4)), (("node1", "node2"),)))
UNTRAINED = format_graph(LayerGraph((node("node1", 1.0, 4), node("node2", 1.0, 4)), (("node1", "node2"),)))


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        (None, ConfigError, r"recipe.profile=.*graph.txt does not exist; give a graph.txt or a profile.json"),
        ("node1 -- what", GraphError, r"line 1 cannot be read: a layer is <name>"),
        ("", GraphError, "no layers"),
        (CYCLE, GraphError, "has a cycle: node2 -> .* layers must not feed themselves"),
        (TEXT.replace("=2.000", "=-2.000"), GraphError, "forward_s=-0.002; a time is a finite number, 0 or more"),
        (IDLE, GraphError, "2 layers that take 0 s together: nothing to rehearse; profile a training step"),
        (UNTRAINED, GraphError, "no layer with parameters, so there is nothing to train; profile"),
    ],
    ids=["missing", "malformed", "empty", "cycle", "negative", "no compute", "no parameters"],
)
def test_records_that_cannot_be_rehearsed(tmp_path: Path, content: str | None, error: type, told: str) -> None:
    path = tmp_path / "graph.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(error, match=told):
        RecordedModel(str(path))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"profile": None}, "recipe.profile is not set; give the profile to rehearse"),
        ({"profile": "graph.csv"}, r"recipe.profile=graph.csv ends in '.csv'; give a graph.txt or a profile.json"),
        ({"dilation": 0.0}, "recipe.dilation=0.0 is no factor for times; give a number above 0"),
        ({"dilation": -1.0}, "recipe.dilation=-1.0 is no factor for times"),
        ({"dilation": float("nan")}, "recipe.dilation=nan is no factor for times"),
        ({"batch_size": 0}, "recipe.batch_size=0 is too small; give the record's, 1 or more"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PlPipeError, match=told):
        RecordedModel(**{"profile": "graph.txt", **settings})


def test_names_that_no_module_can_have(tmp_path: Path) -> None:
    first, last = node("a.keys", 1.0, 4, 4), node("keys", 1.0, 4, 4)
    model = recorded(tmp_path, LayerGraph((first, last), (("a.keys", "keys"),)))
    assert [name for name, _ in model.named_parameters()] == ["layers.a_keys.weight", "layers.keys_.weight"]


def test_the_command_line_rehearses_a_file(inside: Inside, tmp_path: Path) -> None:
    (tmp_path / "graph.txt").write_text(TEXT)
    settings = ["recipe=recorded", "recipe.profile=graph.txt", "recipe.dilation=0.5", "data.batches=3"]
    code, _, err = inside("fit", *settings, "data.batch_size=8")
    assert code == 0, err
    (run,) = (tmp_path / "outputs" / "recorded").iterdir()
    assert not list(run.rglob("*.ckpt"))
    code, _, err = inside("fit", *settings, "data.batches=0")
    assert code != 0
    assert "data.batches=0 is too small; the least is 1" in err
