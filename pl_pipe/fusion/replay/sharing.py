"""What the steps of all variants compute of the batch alone. graph of a step -> *divided* -> once, then for each.

    once       batch ─► x.to(bfloat16), y[:, None] == classes, …
    for each   parameters, batch and what was found once ─► loss, gradients

Branches of the same step would each do it for themselves, and keep its result for their own backward.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from pl_pipe.fusion.replay.graph_facts import is_random, is_torchs, is_view, written_to


@dataclass(frozen=True)
class Divided:
    """Both take and give flat tensors."""

    once: fx.GraphModule
    """Of the batch alone."""
    each: fx.GraphModule
    """Of what the step takes, with the results of `once` before the last."""
    count: int
    """Operations that are computed once."""


def divided(graph: fx.GraphModule, batch: Sequence[int]) -> Divided | None:
    """`batch` are the places of arguments that all have in common. None if there is nothing to compute of them."""
    arguments = graph.graph.find_nodes(op="placeholder")
    given = [arguments[place] for place in batch]
    free = _free(graph, given)
    computed = {node for node in free if not is_view(node) and not _sources([node]).isdisjoint(given)}
    if not computed:
        return None
    first = _sources(computed) & free
    first |= {node for node in free if node.target is operator.getitem and node.all_input_nodes[0] in first}
    results = [node for node in graph.graph.nodes if node in first and not first.issuperset(node.users)]
    return Divided(_once(graph, given, first, results), _each(graph, arguments, first, results), len(computed))


def _free(graph: fx.GraphModule, given: Sequence[fx.Node]) -> set[fx.Node]:
    """Operations that need nothing else, or nothing at all, and whose results nobody writes to."""
    written = written_to(graph)
    known = set(given)
    for node in graph.graph.nodes:
        if known.issuperset(node.all_input_nodes) and node not in written and _is_pure(node):
            known.add(node)
    return known.difference(given)


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function" or not is_torchs(node.target) or is_random(node):
        return False
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def _sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """They and all they are computed of."""
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _once(
    graph: fx.GraphModule, given: Sequence[fx.Node], first: set[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    found = fx.Graph()
    copies = {node: found.node_copy(node) for node in given}
    for node in graph.graph.nodes:
        if node in first:
            copies[node] = found.node_copy(node, copies.__getitem__)
    found.output([copies[node] for node in results])
    return fx.GraphModule(graph, found)


def _each(
    graph: fx.GraphModule, arguments: Sequence[fx.Node], first: set[fx.Node], results: Sequence[fx.Node]
) -> fx.GraphModule:
    found = fx.Graph()
    copies = {node: found.node_copy(node) for node in arguments[:-1]}
    for node in results:
        copies[node] = found.placeholder(f"once_{node.name}")
        copies[node].meta = dict(node.meta)
    copies[arguments[-1]] = found.node_copy(arguments[-1])
    for node in graph.graph.nodes:
        if node not in copies and node not in first:
            copies[node] = found.node_copy(node, copies.__getitem__)
    return fx.GraphModule(graph, found)
