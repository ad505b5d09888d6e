"""From chosen cuts to the stages of a plan: their layers, places, sums and transfers. optimizer -> *stages* -> plan."""

import math
from collections.abc import Mapping, Sequence

from pl_pipe.graph import LayerGraph, LayerNode
from pl_pipe.partition.cuts import side_layers
from pl_pipe.partition.plan import Stage, Transfer


def divide(
    graph: LayerGraph, members: Sequence[Sequence[str]], ranks: Sequence[Sequence[int]]
) -> tuple[tuple[Stage, ...], tuple[Transfer, ...]]:
    """One stage for each list of layers, and what crosses between them."""
    stage_of = _place_side_layers(graph, {name: index for index, names in enumerate(members) for name in names})
    layers: list[list[LayerNode]] = [[] for _ in members]
    for node in graph.in_order():
        layers[stage_of[node.name]].append(node)
    transfers = _transfers_between(graph, stage_of)
    received = [sum(t.size_bytes for t in transfers if t.target == index) for index in range(len(members))]
    stages = tuple(_stage(*entry) for entry in zip(layers, received, ranks, strict=True))
    return stages, transfers


def _place_side_layers(graph: LayerGraph, stage_of: Mapping[str, int]) -> dict[str, int]:
    """Adds the layers that no cut counts: an input joins its first user, an unused selection its source."""
    placed = dict(stage_of)
    inputs, unused = side_layers(graph)
    for name in unused:
        placed[name] = max((placed.get(source, 0) for source in graph.digraph.predecessors(name)), default=0)
    for name in inputs:
        placed[name] = min((placed[user] for user in graph.digraph.successors(name)), default=0)
    return placed


def _transfers_between(graph: LayerGraph, stage_of: Mapping[str, int]) -> tuple[Transfer, ...]:
    """What crosses: each output once for each later stage that needs it, passed on by the nearest that has it."""
    inputs, _ = side_layers(graph)
    sizes: dict[tuple[int, int], int] = {}
    for node in graph.nodes:
        if node.name in inputs:
            continue  # every stage loads its own
        users = {stage_of[user] for user in graph.digraph.successors(node.name)}
        holder = stage_of[node.name]
        for user in sorted(users - {holder}):
            sizes[holder, user] = sizes.get((holder, user), 0) + node.total_output_bytes
            holder = user
    return tuple(Transfer(source, target, size) for (source, target), size in sorted(sizes.items()))


def _stage(nodes: list[LayerNode], received_bytes: int, ranks: Sequence[int]) -> Stage:
    costs = [node for node in nodes if not node.is_input]  # loading data is not the stage's computation
    return Stage(
        nodes=tuple(node.name for node in nodes),
        modules=tuple(dict.fromkeys(node.module for node in nodes if node.module and not node.is_parameter)),
        ranks=tuple(sorted(ranks)),
        forward_s=math.fsum(node.forward_s for node in costs),
        backward_s=math.fsum(node.backward_s for node in costs),
        parameter_bytes=sum(node.parameter_bytes for node in costs),
        activation_bytes=received_bytes + sum(node.kept_bytes for node in costs),
    )
