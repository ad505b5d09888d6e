"""Layers with their costs as a directed acyclic graph. profiling -> *graph* -> partition."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from pl_pipe.errors import GraphError


@dataclass(frozen=True)
class LayerNode:
    """One layer: a leaf module or a functional operation, with its costs for one mini-batch."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    output_bytes: tuple[int, ...]
    """Size of each output; most layers have one."""
    parameter_bytes: int
    stage: int | None = None
    module: str = ""
    """Qualified name of the module, empty for a functional operation."""
    activation_bytes: int | None = None
    """Memory kept for the backward pass; None where it was not measured."""

    def __post_init__(self) -> None:
        for what, value in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if not math.isfinite(value) or value < 0:
                raise GraphError(f"layer {self.name} has {what}={value}; a time is a finite number, 0 or more")
        for size in (*self.output_bytes, self.parameter_bytes, self.activation_bytes or 0):
            if not isinstance(size, int):
                raise GraphError(f"layer {self.name} has a size of {size} bytes; sizes are whole numbers")
        if min(self.parameter_bytes, self.activation_bytes or 0, *self.output_bytes) < 0:
            sizes = f"{self.output_bytes}, {self.parameter_bytes}, {self.activation_bytes}"
            raise GraphError(f"layer {self.name} has a negative size: {sizes} bytes")

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def is_input(self) -> bool:
        """Whether this is the batch (`Input`, or PipeDream's `Input0`), which every stage can load for itself."""
        return not self.module and re.fullmatch(r"Input\d*", self.description) is not None

    @property
    def is_parameter(self) -> bool:
        """Whether this stands for a parameter that several layers share; `module` is then the parameter's name."""
        return self.description == "Parameter" and bool(self.module)

    @property
    def total_output_bytes(self) -> int:
        return sum(self.output_bytes)

    @property
    def kept_bytes(self) -> int:
        """Memory kept for the backward pass; where it was not measured, the size of the outputs stands for it."""
        return self.total_output_bytes if self.activation_bytes is None else self.activation_bytes


@dataclass(frozen=True)
class ValueRead:
    """A place where the step's own Python looked at a tensor's value (`.item()`, `if h.sum() > 0:`)."""

    layer: str
    """The layer whose output was read."""
    after: str
    """The last layer that had run by then."""
    line: str
    """`model.py:17`"""


@dataclass(frozen=True)
class LayerGraph:
    """Layers in the order they were given, and the edges between them."""

    nodes: tuple[LayerNode, ...]
    edges: tuple[tuple[str, str], ...]
    reads: tuple[ValueRead, ...] = ()

    def __post_init__(self) -> None:
        known = set()
        for node in self.nodes:
            if node.name in known:
                raise GraphError(f"layer {node.name} stands twice in the graph; names must differ")
            known.add(node.name)
        for source, target in self.edges:
            for end in (source, target):
                if end not in known:
                    raise GraphError(f"edge {source} -- {target} names {end}, which is no layer of the graph")
        for read in self.reads:
            for end in (read.layer, read.after):
                if end not in known:
                    raise GraphError(f"the value read at {read.line} names {end}, which is no layer of the graph")
        if not nx.is_directed_acyclic_graph(self.digraph):
            cycle = [source for source, _ in nx.find_cycle(self.digraph)]
            raise GraphError(
                f"the graph has a cycle: {' -> '.join([*cycle, cycle[0]])}; layers must not feed themselves"
            )

    @cached_property
    def digraph(self) -> "nx.DiGraph[str]":
        """The graph's shape, for graph algorithms; nodes are names, in the order given."""
        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(node.name for node in self.nodes)
        graph.add_edges_from(self.edges)
        return graph

    @cached_property
    def by_name(self) -> dict[str, LayerNode]:
        return {node.name: node for node in self.nodes}

    def in_order(self) -> list[LayerNode]:
        """Layers such that each comes after all it depends on; the given order decides among equals."""
        position = {node.name: index for index, node in enumerate(self.nodes)}
        order: Iterable[str] = nx.lexicographical_topological_sort(self.digraph, key=position.__getitem__)
        return [self.by_name[name] for name in order]

    @property
    def compute_s(self) -> float:
        return math.fsum(node.compute_s for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        return sum(node.parameter_bytes for node in self.nodes)
