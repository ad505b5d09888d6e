"""profile.json: what is written is what is read, and damage is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pl_pipe.errors import GraphError
from pl_pipe.graph import LayerGraph, LayerNode, Profile, Spread, ValueRead, read_graph, read_profile, write_profile


@pytest.fixture
def profile() -> Profile:
    nodes = (
        LayerNode("node0", "Input", 0.0, 0.0, (64,), 0),
        LayerNode("node1", "LSTM(4, 8)", 0.5, 1.0, (32, 16), 4000, None, "encoder.lstm", 96),
    )
    graph = LayerGraph(nodes, (("node0", "node1"),), (ValueRead("node1", "node1", "model.py:3"),))
    spread = {node.name: Spread((0.1, 0.2), (0.3, 0.4)) for node in nodes}
    return Profile(graph, "Net", "cpu", "float32", ("int64[4, 9]",), "2.10.0", 20, 1.6, 0.01, spread, ("head.bias",))


def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert read_graph(tmp_path / "profile.json") == profile.graph
    assert profile.coverage == pytest.approx(1.5 / 1.6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(schema=9), r"not a profile of schema 1 \(schema: 9\)"),
        (lambda content: content.pop("layers"), "cannot be read as a profile: KeyError"),
        (lambda content: content["layers"][1].pop("forward_s"), "cannot be read as a profile: TypeError"),
        (lambda content: content["layers"][1].update(forward_s=-1.0), "node1 has forward_s=-1.0"),
        (lambda content: content["layers"][1].update(backward_s=float("nan")), "node1 has backward_s=nan"),
        (lambda content: content["layers"][1].update(parameter_bytes=float("nan")), "node1 has a size of nan bytes"),
        (lambda content: content.update(layers=[1]), "cannot be read as a profile: AttributeError"),
        (lambda content: content["layers"][1].update(spread=None), "cannot be read as a profile: AttributeError"),
        (lambda content: content["edges"].append(["node1", "node0"]), "has a cycle"),
        (lambda content: content["edges"].append(["node1", "node7"]), "node7, which is no layer"),
        (lambda content: content["reads"][0].update(layer="node7"), "read at model.py:3 names node7"),
    ],
)
def test_damage_is_named(profile: Profile, tmp_path: Path, change, message: str) -> None:
    content = json.loads(json.dumps(profile.as_json()))
    change(content)
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with pytest.raises(GraphError, match=message):
        read_profile(tmp_path / "profile.json")


def test_kept_memory_defaults_to_the_outputs(profile: Profile) -> None:
    measured = profile.graph.nodes[1]
    assert (measured.kept_bytes, replace(measured, activation_bytes=None).kept_bytes) == (96, 48)
