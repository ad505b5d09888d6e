"""PipeDream's `graph.txt`, read and written without loss. SOSP'19 artifact, `graph/graph.py`.

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, activation_size=[6291456.0; 131072.0], parameter_size=50364416.000 -- stage_id=1
    <tab>node6 -- node7

Times are milliseconds with three decimals, sizes bytes; a stage may follow. The artifact's two profilers write
activation sizes differently (`%.3f` by the image one, Python's own form by the translation one), so a file's style is
kept beside its graph.
"""  # noqa: E501

import math
import re
from enum import Enum

from pl_pipe.errors import GraphError
from pl_pipe.graph.layer_graph import LayerGraph, LayerNode

_NODE = re.compile(
    r"(?P<name>.+?) -- (?P<description>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), activation_size=(?P<outputs>\[.*\]|[^,]+), "
    r"parameter_size=(?P<parameters>\S+?)(?: -- stage_id=(?P<stage>\d+))?"
)
_EDGE = re.compile(r"\t(?P<source>.+?) -- (?P<target>.+)")


class TextStyle(Enum):
    """How a file writes the size of a single output."""

    FIXED = "three decimals"
    PLAIN = "Python's float"


def parse_graph(text: str) -> tuple[LayerGraph, TextStyle]:
    """The graph in a `graph.txt`, and the style in which `format_graph` gives the same text back."""
    nodes: list[LayerNode] = []
    edges: list[tuple[str, str]] = []
    style = TextStyle.FIXED
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("\t"):
            edge = _EDGE.fullmatch(line)
            if edge is None:
                raise _malformed(number, line, "an edge is <tab><layer> -- <layer>")
            edges.append((edge["source"], edge["target"]))
        elif line.strip():
            found = _NODE.fullmatch(line)
            if found is None:
                raise _malformed(number, line, "a layer is <name> -- <description> -- forward_compute_time=…, …")
            nodes.append(_node(found, number, line))
            if not found["outputs"].startswith("[") and not re.fullmatch(r"\d+\.\d{3}", found["outputs"]):
                style = TextStyle.PLAIN
    if not nodes:
        raise GraphError("the graph has no layers; a graph.txt holds one line a layer, then one a dependency")
    return LayerGraph(tuple(nodes), tuple(edges)), style


def format_graph(graph: LayerGraph, style: TextStyle = TextStyle.FIXED) -> str:
    """The graph as PipeDream's tools read it."""
    lines = [_line(node, style) for node in graph.nodes]
    lines += [f"\t{source} -- {target}" for source, target in graph.edges]
    return "\n".join(lines)


def _node(found: re.Match[str], number: int, line: str) -> LayerNode:
    outputs = found["outputs"].strip("[]").split(";")
    try:
        return LayerNode(
            name=found["name"],
            description=found["description"],
            forward_s=_number(found["forward"]) / 1e3,
            backward_s=_number(found["backward"]) / 1e3,
            output_bytes=tuple(_bytes(size) for size in outputs),
            parameter_bytes=_bytes(found["parameters"]),
            stage=None if found["stage"] is None else int(found["stage"]),
        )
    except (ValueError, GraphError) as error:
        raise _malformed(number, line, str(error)) from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number") from None


def _bytes(text: str) -> int:
    value = _number(text)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{text.strip()} is not a whole number of bytes")
    return int(value)


def _malformed(number: int, line: str, reason: str) -> GraphError:
    shown = line if len(line) <= 100 else line[:100] + "…"
    return GraphError(f"graph.txt line {number} cannot be read: {reason}; the line is {shown!r}")


def _line(node: LayerNode, style: TextStyle) -> str:
    if len(node.output_bytes) == 1:
        size = node.output_bytes[0]
        outputs = f"{size:.3f}" if style is TextStyle.FIXED else str(float(size))
    else:
        outputs = "[" + "; ".join(str(float(size)) for size in node.output_bytes) + "]"
    stage = "" if node.stage is None else f" -- stage_id={node.stage}"
    return (
        f"{node.name} -- {node.description} -- forward_compute_time={node.forward_s * 1e3:.3f}, "
        f"backward_compute_time={node.backward_s * 1e3:.3f}, activation_size={outputs}, "
        f"parameter_size={node.parameter_bytes:.3f}{stage}"
    )
