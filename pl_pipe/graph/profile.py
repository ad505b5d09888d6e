"""A measured model: its layer graph, and what it was measured on. profiling -> *profile.json* -> partition."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import networkx as nx

from pl_pipe.errors import GraphError
from pl_pipe.graph.layer_graph import LayerGraph, LayerNode, ValueRead
from pl_pipe.graph.pipedream_text import parse_graph
from pl_pipe.json_file import check_schema, read_json

SCHEMA = 1
_REMEDY = "`pl-pipe profile` writes one"
_APART = ("graph", "spread", "batch", "unused_parameters")  # written and read in their own way


@dataclass(frozen=True)
class Spread:
    """How far the repeats of one layer's measurement lay apart."""

    forward_s: tuple[float, float]
    """First and third quartile."""
    backward_s: tuple[float, float]


@dataclass(frozen=True)
class Profile:
    """One step of a model, layer by layer."""

    graph: LayerGraph
    model: str
    """The model's class."""
    device: str
    dtype: str
    batch: tuple[str, ...]
    """Each tensor of the batch, as `float32[64, 3, 32, 32]`."""
    torch_version: str
    repeats: int
    step_s: float
    """A whole forward and backward pass, measured without looking into it."""
    data_load_s: float | None
    """Time to fetch a batch; None where there was no data loader."""
    spread: Mapping[str, Spread]
    """By layer."""
    unused_parameters: tuple[str, ...] = ()
    """Parameters that the step did not use, so that no layer counts them."""

    @property
    def coverage(self) -> float:
        """The layers' times by the whole step's: 1 where the layers explain the step."""
        return self.graph.compute_s / self.step_s if self.step_s else 0.0

    def as_json(self) -> dict[str, Any]:
        layers = [{**asdict(node), "spread": asdict(self.spread[node.name])} for node in self.graph.nodes]
        facts = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _APART}
        return {
            "schema": SCHEMA,
            **facts,
            "batch": list(self.batch),
            "unused_parameters": list(self.unused_parameters),
            "layers": layers,
            "edges": [list(edge) for edge in self.graph.edges],
            "reads": [asdict(read) for read in self.graph.reads],
        }

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> "Profile":
        check_schema(content, SCHEMA, source=source, what="profile", error=GraphError, remedy=_REMEDY)
        try:
            nodes, spread = [], {}
            for entry in content["layers"]:
                costs = {name: value for name, value in entry.items() if name != "spread"}
                nodes.append(LayerNode(**{**costs, "output_bytes": tuple(costs["output_bytes"])}))
                spread[costs["name"]] = Spread(**{way: tuple(ends) for way, ends in entry["spread"].items()})
            edges = tuple((str(a), str(b)) for a, b in content["edges"])
            reads = tuple(ValueRead(**entry) for entry in content["reads"])
            names = [item.name for item in fields(cls) if item.name not in _APART]
            return cls(
                graph=LayerGraph(tuple(nodes), edges, reads),
                spread=spread,
                batch=tuple(content["batch"]),
                unused_parameters=tuple(content["unused_parameters"]),
                **{name: content[name] for name in names},
            )
        except GraphError as error:
            raise GraphError(f"{source}: {error}") from error
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise GraphError(f"{source} cannot be read as a profile: {error!r}; {_REMEDY}") from error


def write_profile(profile: Profile, path: Path) -> None:
    path.write_text(json.dumps(profile.as_json(), indent=1) + "\n")


def read_profile(path: Path) -> Profile:
    content = read_json(path, name=f"profile={path}", error=GraphError, remedy=_REMEDY)
    return Profile.from_json(content, source=str(path))


def read_graph(path: Path) -> LayerGraph:
    """The layer graph in a `profile.json` or in one of PipeDream's `graph.txt` files."""
    if path.suffix == ".json":
        return read_profile(path).graph
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError(f"profile={path} cannot be read: {error}; {_REMEDY}") from error
    try:
        graph = parse_graph(text)[0]
        _check_whole(graph)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from error
    return graph


def _check_whole(graph: LayerGraph) -> None:
    """Dependencies stand at the end of a `graph.txt`: one that was cut off there can still be read."""
    working = {node.name for node in graph.nodes if node.compute_s or node.parameter_bytes}
    parts = [part & working for part in nx.weakly_connected_components(graph.digraph) if part & working]
    if len(parts) > 1:
        alone = min(parts, key=len)
        raise GraphError(
            f"{len(alone)} layer(s) with work to do, {min(alone)} among them, have nothing to do with the other "
            f"{len(working) - len(alone)}: no line <tab><layer> -- <layer> leads from one to the other. The file seems "
            "to be cut off; write it again"
        )
