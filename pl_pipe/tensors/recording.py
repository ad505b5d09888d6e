"""What one recorded step says about a model. recorder -> *Recording* -> profiling.

Parameters become part of the graph here. One that a single layer uses counts with that layer. One that several use
(tied embeddings, a module called twice) stands as a node of its own just before its first user, because every user
needs it wherever the graph is cut:

    Input ──► Parameter ──► Embedding ──► … ──► linear
      └───────────┼─────────────▲                 ▲
                  └───────────────────────────────┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pl_pipe.graph import LayerGraph, LayerNode, ValueRead


@dataclass
class RecordedLayer:
    """One layer as it ran; `sources` and positions are numbers in execution order."""

    module: str
    description: str
    sources: frozenset[int]
    """Layers whose outputs it takes; 0 stands for tensors that depend on the batch alone."""
    parameters: tuple[str, ...] = ()
    output_bytes: tuple[int, ...] = (0,)
    activation_bytes: int | None = None


@dataclass(frozen=True)
class RecordedRead:
    """A look at the value of `layer`'s output, when `after` was the last layer to have run."""

    layer: int
    after: int
    line: str


@dataclass(frozen=True)
class Recording:
    """The layer graph of one step, without times."""

    graph: LayerGraph
    layer_names: tuple[str, ...]
    """The graph's nodes that ran, in order: the input and the layers, without the nodes of shared parameters."""
    unused_parameters: tuple[str, ...]
    """Parameters that no layer used in this step; a plan must place them too."""


def assemble(
    layers: Sequence[RecordedLayer], reads: Sequence[RecordedRead], parameter_bytes: Mapping[str, int]
) -> Recording:
    """The graph of recorded layers; the first of them is the step's input."""
    users = _users(layers)
    nodes: list[LayerNode] = []
    edges: list[tuple[str, str]] = []
    node_of_layer: list[int] = []
    node_of_parameter: dict[str, int] = {}

    def add(node: LayerNode, sources: Sequence[int]) -> int:
        nodes.append(node)
        edges.extend((_name(source), node.name) for source in sorted(sources))
        return len(nodes) - 1

    for position, layer in enumerate(layers):
        sources = [node_of_layer[source] for source in layer.sources]
        shared = [name for name in layer.parameters if len(users[name]) > 1]
        for name in shared:
            if name not in node_of_parameter:
                node = _parameter_node(_name(len(nodes)), name, parameter_bytes[name])
                node_of_parameter[name] = add(node, sources)
        node = LayerNode(
            name=_name(len(nodes)),
            description=layer.description,
            forward_s=0.0,
            backward_s=0.0,
            output_bytes=layer.output_bytes,
            parameter_bytes=sum(parameter_bytes[name] for name in layer.parameters if users[name] == [position]),
            module=layer.module,
            activation_bytes=layer.activation_bytes,
        )
        node_of_layer.append(add(node, [*sources, *(node_of_parameter[name] for name in shared)]))
    names = tuple(_name(node) for node in node_of_layer)
    value_reads = (ValueRead(names[read.layer], names[read.after], read.line) for read in reads)
    return Recording(
        graph=LayerGraph(tuple(nodes), tuple(edges), tuple(dict.fromkeys(value_reads))),
        layer_names=names,
        unused_parameters=tuple(name for name in parameter_bytes if name not in users),
    )


def _name(node: int) -> str:
    return f"node{node}"


def _users(layers: Sequence[RecordedLayer]) -> dict[str, list[int]]:
    """The layers that use each parameter."""
    users: dict[str, list[int]] = {}
    for position, layer in enumerate(layers):
        for name in layer.parameters:
            users.setdefault(name, []).append(position)
    return users


def _parameter_node(node: str, parameter: str, size: int) -> LayerNode:
    return LayerNode(
        name=node,
        description="Parameter",
        forward_s=0.0,
        backward_s=0.0,
        output_bytes=(size,),
        parameter_bytes=size,
        module=parameter,
        activation_bytes=0,
    )
