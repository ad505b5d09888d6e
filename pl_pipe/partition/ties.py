"""Layers that no plan can place, because the pipeline runs them where others stand. graph -> *ties* -> cuts.

A plan places modules. Everything else follows from where they stand:

    an operation            relu(h), a + b       runs on the last stage among those of its inputs
    a module's later call   self.relu again      the same, and not before the module's own stage
    what no module feeds    a shared parameter,  lies with the first layer that uses it beside a module's output, or is
                            x + self.position    a module itself

So a cut that holds all an operation needs holds the operation:

    conv ──► relu ──► conv        cuts:  ∅,  {conv, relu},  {conv, relu, conv};  none between conv and its relu

Graphs that name no modules, such as PipeDream's published ones, have layers of one kind, and no ties.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from pl_pipe.graph import LayerGraph, LayerNode


@dataclass(frozen=True)
class Ties:
    """Who follows whom, by the layers' names."""

    leaders: Mapping[str, tuple[str, ...]]
    """For each follower those it follows: it is inside a cut when all of them are. Leaders come before followers."""
    makes_stage: frozenset[str]
    """Layers of which every stage has at least one: modules, where the graph names any."""
    anchors: Mapping[str, str]
    """Followers that run before the one layer they follow; what needs such a follower needs that layer."""

    def closed(self, held: Collection[str]) -> set[str]:
        """The cut that holds the same leading layers as `held`, and all that follows from them."""
        cut = {name for name in held if name not in self.leaders}
        for follower, leaders in self.leaders.items():
            if all(leader in cut for leader in leaders):
                cut.add(follower)
        return cut


@lru_cache(maxsize=4)
def ties_of(graph: LayerGraph) -> Ties:
    """The ties of a graph; none where it names no modules."""
    layers = graph.in_order()
    calls = [node for node in layers if node.module and not node.is_parameter]
    if not calls:
        return Ties({}, frozenset(node.name for node in layers), {})
    first_call = {node.module: node.name for node in reversed(calls)}
    leaders: dict[str, tuple[str, ...]] = {}
    afloat = _Afloat()
    for node in layers:
        before = set(graph.digraph.predecessors(node.name))
        if node.is_input and not before:
            continue  # the batch, which is everywhere
        if node.is_parameter:
            afloat.add(node.name, ())
            continue
        sources = {
            afloat.anchors.get(source, source) for source in before if not _is_batch(graph.by_name[source], graph)
        }
        followed = sources - afloat.group_of.keys()
        if node.name == first_call.get(node.module):
            afloat.anchor(sources, node.name)
        elif followed or node.module:
            if node.module:
                followed.add(first_call[node.module])
            leaders[node.name] = tuple(sorted(followed))
            afloat.anchor(sources, node.name)
        else:
            afloat.add(node.name, sources)
    leaders.update({name: (anchor,) for name, anchor in afloat.anchors.items()})
    return Ties(leaders, frozenset(first_call.values()), afloat.anchors)


@dataclass
class _Afloat:
    """Layers that depend on no module so far, in groups that belong together, until a layer that is placed uses one."""

    group_of: dict[str, set[str]] = field(default_factory=dict)
    anchors: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, sources: Iterable[str]) -> None:
        group = {name}.union(*(self.group_of[source] for source in sources))
        self.group_of.update(dict.fromkeys(group, group))

    def anchor(self, sources: Iterable[str], user: str) -> None:
        for source in sources:
            for name in self.group_of.get(source, ()):
                self.anchors[name] = user
        for name in self.anchors.keys() & self.group_of.keys():
            del self.group_of[name]


def _is_batch(node: LayerNode, graph: LayerGraph) -> bool:
    return node.is_input and not graph.digraph.in_degree(node.name)
