"""The layer graph, and PipeDream's text form of it without loss."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pl_pipe.errors import GraphError
from pl_pipe.graph import LayerGraph, LayerNode, TextStyle, format_graph, parse_graph, read_graph
from tests.conftest import ROOT

PROFILES = Path(os.environ.get("PL_PIPE_TEST_DATA", ROOT.parent / "shared" / "data")) / "pipedream"
PUBLISHED = ("alexnet", "densenet121", "gnmt", "resnet18", "resnet50", "vgg16")
CONV = (
    "conv -- Conv2d(3, 8) -- forward_compute_time=1.000, backward_compute_time=2.500, "
    "activation_size=64.000, parameter_size=32.000"
)
RELU = (
    "relu -- ReLU(inplace) -- forward_compute_time=0.250, backward_compute_time=0.000, "
    "activation_size=64.000, parameter_size=0.000"
)


def node(name: str, **costs: object) -> LayerNode:
    defaults = {"description": name, "forward_s": 1.0, "backward_s": 2.0, "output_bytes": (4,), "parameter_bytes": 8}
    return LayerNode(name, **(defaults | costs))  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", PUBLISHED)
def test_published_profiles_survive_byte_for_byte(profile: str) -> None:
    file = PROFILES / f"{profile}.graph.txt"
    if not file.is_file():
        pytest.skip("no published PipeDream profiles; set PL_PIPE_TEST_DATA to the folder that holds pipedream/")
    text = file.read_text()
    graph, style = parse_graph(text)
    assert format_graph(graph, style) == text
    assert len(graph.in_order()) == len(graph.nodes)


def test_a_small_graph_is_read() -> None:
    graph, style = parse_graph(f"{CONV}\n{RELU} -- stage_id=1\n\tconv -- relu")
    assert style is TextStyle.FIXED
    assert graph.by_name["conv"] == LayerNode("conv", "Conv2d(3, 8)", 0.001, 0.0025, (64,), 32)
    assert graph.by_name["relu"].stage == 1
    assert graph.edges == (("conv", "relu"),)
    assert graph.compute_s == pytest.approx(0.00375)
    assert graph.parameter_bytes == 32


NAMES = st.lists(st.from_regex(r"node\d{1,3}", fullmatch=True), min_size=1, max_size=6, unique=True)
SIZES = st.integers(0, 2**50)


@given(st.data(), NAMES, st.sampled_from(TextStyle))
def test_any_graph_survives_the_text(data: st.DataObject, names: list[str], style: TextStyle) -> None:
    nodes = tuple(
        LayerNode(
            name,
            data.draw(st.from_regex(r"[A-Z][A-Za-z(), =\d]{0,20}\)", fullmatch=True)),
            data.draw(st.integers(0, 10**7)) / 1e6,  # whole microseconds, which three decimals of a millisecond hold
            data.draw(st.integers(0, 10**7)) / 1e6,
            tuple(data.draw(st.lists(SIZES, min_size=1, max_size=3))),
            data.draw(SIZES),
            data.draw(st.none() | st.integers(0, 99)),
        )
        for name in names
    )
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    edges = tuple(data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else [])
    text = format_graph(LayerGraph(nodes, edges), style)
    again, _ = parse_graph(text)
    assert again.edges == edges
    for ours, theirs in zip(nodes, again.nodes, strict=True):
        assert (ours.name, ours.description, ours.output_bytes) == (
            theirs.name,
            theirs.description,
            theirs.output_bytes,
        )
        assert (ours.parameter_bytes, ours.stage) == (theirs.parameter_bytes, theirs.stage)
        assert (ours.forward_s, ours.backward_s) == pytest.approx((theirs.forward_s, theirs.backward_s), abs=1e-12)


def test_order_follows_edges_and_then_the_file() -> None:
    graph = LayerGraph((node("d"), node("c"), node("b"), node("a")), (("a", "b"), ("b", "d"), ("a", "c")))
    assert [layer.name for layer in graph.in_order()] == ["a", "c", "b", "d"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the graph has no layers"),
        (f"{CONV}\nnonsense", r"line 2 cannot be read: a layer is <name> .* the line is 'nonsense'"),
        (f"{CONV}\n\tconv", "line 2 cannot be read: an edge is"),
        (CONV.replace("1.000", "fast"), "line 1 cannot be read: 'fast' is not a number"),
        (CONV.replace("1.000", "-1.000"), r"line 1 cannot be read: layer conv has forward_s=-0.001; a time is"),
        (CONV.replace("2.500", "nan"), r"layer conv has backward_s=nan; a time is a finite number"),
        (CONV.replace("2.500", "inf"), r"layer conv has backward_s=inf"),
        (CONV.replace("64.000", "64.5"), "64.5 is not a whole number of bytes"),
        (CONV.replace("32.000", "-32.000"), "layer conv has a negative size"),
        (f"{CONV}\n{CONV}", "layer conv stands twice in the graph"),
        (f"{CONV}\n\tconv -- pool", "edge conv -- pool names pool, which is no layer"),
        (f"{CONV}\n{RELU}\n\tconv -- relu\n\trelu -- conv", "the graph has a cycle: conv -> relu -> conv"),
    ],
)
def test_malformed_graphs_are_refused(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse_graph(text)


@pytest.mark.parametrize("profile", ["vgg16", "resnet50", "gnmt"])
def test_a_graph_that_was_cut_off_among_its_edges_is_refused(profile: str, tmp_path: Path) -> None:
    """All of its layers are there, and it would be planned as if they had nothing to send each other."""
    folder = Path(__file__).parents[1] / "benchmarks" / "pipedream" / "profiles"
    text = (folder / f"{profile}.graph.txt").read_text().rstrip("\n")
    first_edge = text.index("\n\t") + 2
    cut = tmp_path / "cut.graph.txt"
    for until in (first_edge, first_edge + 40, (first_edge + len(text)) // 2, len(text) - 1):
        cut.write_text(text[:until])
        with pytest.raises(GraphError, match=r"cut off; write it again|line .* cannot be read|is no layer|a cycle"):
            read_graph(cut)
    cut.write_text(text)
    assert read_graph(cut) == read_graph(folder / f"{profile}.graph.txt")
