"""A model whose layers cost what a test says, for tests of what the planner chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.graph import LayerGraph, Profile, Spread
from pl_pipe.profiling import record_step

BATCH = (torch.ones(2, 4),)


@dataclass(frozen=True)
class Cost:
    """Of one layer: forward a third of the time, backward the rest."""

    ms: float
    weights_mb: float = 0.0
    output_mb: float = 0.0


class Chain(nn.Module):
    """Layers one after the other; how large they really are does not matter."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = getattr(self, name)(x)
        return x


def chain_graph(costs: Mapping[str, Cost]) -> LayerGraph:
    graph = record_step(Chain(list(costs)), BATCH).graph
    return replace(graph, nodes=tuple(_priced(node, costs) for node in graph.nodes))


def chain_profile(costs: Mapping[str, Cost]) -> Profile:
    graph = chain_graph(costs)
    no_spread = {node.name: Spread((0.0, 0.0), (0.0, 0.0)) for node in graph.nodes}
    return Profile(graph, "Chain", "cpu", "float32", (), "2", 1, graph.compute_s, None, no_spread)


def _priced(node: Any, costs: Mapping[str, Cost]) -> Any:
    if node.module not in costs:
        return replace(node, forward_s=0.0, backward_s=0.0)
    cost = costs[node.module]
    return replace(
        node,
        forward_s=cost.ms / 3e3,
        backward_s=cost.ms / 1.5e3,
        parameter_bytes=int(cost.weights_mb * 1e6),
        output_bytes=(int(cost.output_mb * 1e6),),
        activation_bytes=int(cost.output_mb * 1e6),
    )
