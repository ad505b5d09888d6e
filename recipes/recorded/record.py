"""The profile that a recorded model follows: read, checked, and named for a model. file -> *Record* -> module."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from pl_pipe.errors import ConfigError, GraphError
from pl_pipe.graph import LayerGraph, LayerNode, read_graph
from pl_pipe.partition.cuts import side_layers

SUFFIXES = (".txt", ".json")


@dataclass(frozen=True)
class Record:
    """A layer graph and the names of its layers' modules."""

    graph: LayerGraph
    names: dict[str, str]
    """Of each layer but the inputs, as a part of a module's name; in execution order."""

    @classmethod
    def read(cls, profile: str | None) -> "Record":
        if profile is None:
            raise ConfigError(
                "recipe.profile is not set; give the profile to rehearse, a graph.txt of PipeDream's or a profile.json "
                "of pl-pipe profile"
            )
        path = Path(profile).expanduser()
        if path.suffix not in SUFFIXES:
            raise ConfigError(
                f"recipe.profile={profile} ends in {path.suffix or 'nothing'!r}; give a graph.txt or a profile.json"
            )
        if not path.is_file():
            fact = "is no file" if path.exists() else "does not exist"
            raise ConfigError(f"recipe.profile={profile} {fact}; give a graph.txt or a profile.json")
        return cls.of(read_graph(path), source=profile)

    @classmethod
    def of(cls, graph: LayerGraph, *, source: str = "the graph") -> "Record":
        inputs, _ = side_layers(graph)
        layers = [node for node in graph.in_order() if node.name not in inputs]
        remedy = "profile a training step with pl-pipe profile"
        if not math.fsum(node.compute_s for node in layers):
            raise GraphError(f"{source} has {len(layers)} layers that take 0 s together: nothing to rehearse; {remedy}")
        if not any(node.parameter_bytes for node in layers):
            raise GraphError(f"{source} has no layer with parameters, so there is nothing to train; {remedy}")
        return cls(graph, _names(layers))

    def inputs_of(self, layer: str) -> list[str]:
        """The layers whose outputs it takes; without the batch."""
        return [source for source in self.graph.digraph.predecessors(layer) if source in self.names]

    @property
    def outputs(self) -> list[str]:
        """The layers that the loss is made from: all that no other takes, but selections that nobody used."""
        _, unused = side_layers(self.graph)
        return [name for name in self.names if not self.graph.digraph.out_degree(name) and name not in unused]

    def dilated(self, dilation: float, *, share: float = 1.0) -> LayerGraph:
        """The graph with the times and sizes of a part of the recorded batch, on a slower clock."""
        return replace(self.graph, nodes=tuple(_dilated(node, dilation, share) for node in self.graph.nodes))


def _dilated(node: LayerNode, dilation: float, share: float) -> LayerNode:
    return replace(
        node,
        forward_s=node.forward_s * dilation * share,
        backward_s=node.backward_s * dilation * share,
        output_bytes=tuple(round(size * share) for size in node.output_bytes),
        activation_bytes=None if node.activation_bytes is None else round(node.activation_bytes * share),
    )


def _names(layers: list[LayerNode]) -> dict[str, str]:
    """Layers by names that a module may have: without dots, and not those of a ModuleDict's own methods."""
    names: dict[str, str] = {}
    taken = set(dir(nn.ModuleDict()))
    for node in layers:
        name = node.name.replace(".", "_")
        while name in taken:
            name += "_"
        taken.add(name)
        names[node.name] = name
    return names
