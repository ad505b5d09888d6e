"""The places where a layer graph can be cut. graph -> *cuts* -> tables.

A cut is a set of layers that holds, with each layer, all it depends on: what lies in it runs before the cut, the rest
after. A chain of N layers has N + 1 cuts; two branches of p and q layers side by side have (p + 1)(q + 1). Layers that
follow others (`ties`) are no choice: cuts are made between the leading ones, and then hold what follows from them. All
are considered while they are few. Where branches make too many, the graph is taken in blocks, divided at the layers
that every path passes, and inside the largest blocks only the cuts along the execution order are kept:

    all cuts of a block          (0,0) (1,0) (2,0) (0,1) (1,1) (2,1) …
    along the execution order    (0,0) (1,0) (2,0) (2,1) (2,2)
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pl_pipe.graph import LayerGraph, LayerNode, ValueRead
from pl_pipe.partition.ties import Ties, ties_of

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_CUTS = 2000
"""Above this, branches are put in order: tables grow with the square of the number of cuts."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Cuts from the empty to the full one, each larger than or as large as the one before.

    Legend: S cuts, N layers. `x_S[b] - x_S[a]` is the sum of x over the layers between cuts a and b.
    """

    layers: tuple[LayerNode, ...]
    """Those that take part, in execution order: neither inputs nor unused selections."""
    holds_SN: Bools
    inside_SS: Bools
    """[a, b]: cut a is a part of cut b, and what lies between them can be a stage."""
    compute_s_S: Floats
    forward_s_S: Floats
    parameter_bytes_S: Floats
    output_bytes_S: Floats
    """All outputs of layers inside: what PipeDream counts as kept memory."""
    kept_bytes_S: Floats
    """Memory kept for the backward pass."""
    crossing_bytes_S: Floats
    """Outputs that are needed on the other side."""
    ordered: int
    """Layers in blocks that were put in order: 0 where all cuts are considered."""

    def __len__(self) -> int:
        return len(self.compute_s_S)

    def most_stages(self) -> int:
        """Into how many stages the layers can be divided at most: the longest way from the empty to the full cut."""
        stages_S = np.full(len(self), -np.inf)
        stages_S[0] = 0
        for end in range(1, len(self)):
            stages_S[end] = 1 + stages_S[self.inside_SS[:, end]].max(initial=-np.inf)
        return int(max(stages_S[-1], 0))


def side_layers(graph: LayerGraph) -> tuple[frozenset[str], frozenset[str]]:
    """Input layers, which every stage can load for itself, and selections (`__getitem__`) that nobody uses."""
    shape = graph.digraph
    inputs = {n.name for n in graph.nodes if n.is_input and not shape.in_degree(n.name)}
    selections = {n.name for n in graph.nodes if not n.module and n.description.startswith("__getitem__")}
    unused = {name for name in selections if not shape.out_degree(name) and not graph.by_name[name].parameter_bytes}
    return frozenset(inputs), frozenset(unused - inputs)


@lru_cache(maxsize=4)
def cuts_of(graph: LayerGraph, most: int = MOST_CUTS) -> Cuts:
    """All cuts of the graph, or a bounded choice of them; none that separates a value read from what it needs."""
    inputs, unused = side_layers(graph)
    layers = [node for node in graph.in_order() if node.name not in inputs | unused]
    number = {node.name: index for index, node in enumerate(layers)}
    edges = [(number[a], number[b]) for a, b in graph.edges if a in number and b in number]
    ties = ties_of(graph)
    holds_SN, ordered = _considered([node.name for node in layers], edges, ties, most)
    crossing_SN = _crossing(holds_SN, edges)
    allowed_S = _allowed(graph, number, holds_SN, edges)
    outputs_N = np.array([node.total_output_bytes for node in layers], dtype=float)
    crossing_bytes_S = crossing_SN @ outputs_N
    kept = _thin(allowed_S, crossing_bytes_S, most)
    holds_SN, crossing_bytes_S = holds_SN[kept], crossing_bytes_S[kept]
    held_SN = holds_SN.astype(np.float32)  # counts below 2^24 are exact, and the product is fast
    outside_SS = held_SN @ (1 - held_SN).T
    makes_stage_N = np.array([node.name in ties.makes_stage for node in layers], dtype=bool)
    size_S = holds_SN[:, makes_stage_N].sum(axis=1)

    def total(values: list[float]) -> Floats:
        return np.asarray(holds_SN @ np.array(values, dtype=float), dtype=float)

    return Cuts(
        layers=tuple(layers),
        holds_SN=holds_SN,
        inside_SS=(outside_SS == 0) & (size_S[:, None] < size_S[None, :]),
        compute_s_S=total([node.compute_s for node in layers]),
        forward_s_S=total([node.forward_s for node in layers]),
        parameter_bytes_S=total([node.parameter_bytes for node in layers]),
        output_bytes_S=total([node.total_output_bytes for node in layers]),
        kept_bytes_S=total([node.kept_bytes for node in layers]),
        crossing_bytes_S=crossing_bytes_S,
        ordered=ordered,
    )


def _considered(names: list[str], edges: list[tuple[int, int]], ties: Ties, most: int) -> tuple[Bools, int]:
    """Cuts between the leading layers, smallest first, each with all that follows from it; and as `_choose`."""
    number = {name: index for index, name in enumerate(names)}
    leaders = {
        number[name]: [number[leader] for leader in ties.leaders[name]] for name in ties.leaders if name in number
    }
    leading = [layer for layer in range(len(names)) if layer not in leaders]
    place = {layer: index for index, layer in enumerate(leading)}
    sources = [set(leaders.get(layer, ())) for layer in range(len(names))]
    for source, target in edges:
        if target in place:  # what a follower depends on it follows
            sources[target].add(number[ties.anchors.get(names[source], names[source])])
    # Needs are among the leading layers, directly or through followers. What is anchored runs before its leader;
    # its own needs are not asked for.
    needs: list[set[int]] = []
    for layer, direct in enumerate(sources):
        before = (({source} if source in place else needs[source]) for source in direct - {layer} if source < layer)
        needs.append(set().union(*before))
    between = [(place[source], place[layer]) for layer in leading for source in sorted(needs[layer])]
    masks, ordered = _choose(len(leading), between, most)
    holds_SN = np.zeros((len(masks), len(names)), dtype=bool)
    holds_SN[:, leading] = _unpack(masks, len(leading))
    for follower, led_by in leaders.items():
        holds_SN[:, follower] = holds_SN[:, led_by].all(axis=1)
    return holds_SN[np.argsort(holds_SN.sum(axis=1), kind="stable")], ordered


def _choose(count: int, edges: list[tuple[int, int]], most: int) -> tuple[list[int], int]:
    """Cuts as bit masks, smallest first, and the number of layers in blocks that had to be put in order."""
    before = [0] * count  # direct predecessors
    for source, target in edges:
        before[target] |= 1 << source
    blocks = _blocks(before, edges)
    found = [_down_sets(block, before, most) for block in blocks]
    sizes = [most + 1 if sets is None else len(sets) for sets in found]
    ordered = 0
    for index in sorted(range(len(blocks)), key=lambda index: -sizes[index]):
        if sum(sizes) <= most and found[index] is not None:
            break
        found[index], sizes[index] = _along(blocks[index]), len(blocks[index])
        ordered += len(blocks[index]) if len(blocks[index]) > 1 else 0
    masks, done = [0], 0
    for block, sets in zip(blocks, found, strict=True):
        assert sets is not None
        masks += [done | local for local in sets]
        done |= sum(1 << node for node in block)
    return masks, ordered


def _blocks(before: list[int], edges: list[tuple[int, int]]) -> list[list[int]]:
    """The layers divided at those that all others come before or after; such a layer is a block of its own."""
    count = len(before)
    above, below = list(before), [0] * count
    for node in range(count):  # predecessors come first in the order
        for source in _bits(before[node]):
            above[node] |= above[source]
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target in edges:
        after[source].append(target)
    for node in reversed(range(count)):
        for target in after[node]:
            below[node] |= below[target] | 1 << target
    blocks: list[list[int]] = [[]]
    for node in range(count):
        if above[node].bit_count() + below[node].bit_count() + 1 == count:
            blocks += [[node], []]
        else:
            blocks[-1].append(node)
    return [block for block in blocks if block]


def _down_sets(block: list[int], before: list[int], most: int) -> list[int] | None:
    """All non-empty sets inside the block that hold their members' predecessors; None if there are too many."""
    inside = sum(1 << node for node in block)
    needs = {node: before[node] & inside for node in block}
    seen, layer = {0}, [0]
    while layer:
        grown = set()
        for held in layer:
            for node in block:
                if not held >> node & 1 and needs[node] & ~held == 0:
                    grown.add(held | 1 << node)
        seen |= grown
        if len(seen) > most:
            return None
        layer = list(grown)
    return sorted(seen - {0}, key=lambda held: (held.bit_count(), held))


def _along(block: list[int]) -> list[int]:
    held, found = 0, []
    for node in block:
        held |= 1 << node
        found.append(held)
    return found


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _unpack(masks: list[int], count: int) -> Bools:
    width = (count + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(masks), width), axis=1, bitorder="little")[:, :count].astype(bool)


def _crossing(holds_SN: Bools, edges: list[tuple[int, int]]) -> Floats:
    """[s, n]: layer n lies in cut s and something outside needs it."""
    crossing_SN = np.zeros(holds_SN.shape, dtype=bool)
    for source, target in edges:
        crossing_SN[:, source] |= holds_SN[:, source] & ~holds_SN[:, target]
    return crossing_SN.astype(float)


def _allowed(graph: LayerGraph, number: dict[str, int], holds_SN: Bools, edges: list[tuple[int, int]]) -> Bools:
    """Cuts that no value read forbids.

    Where the step reads a value, its Python goes on only where that value is known: on the stage that computes it and
    on later ones. Earlier stages are done, so nothing of theirs may be needed first after the read.
    """
    allowed_S = np.ones(len(holds_SN), dtype=bool)
    for read in graph.reads:
        if read.layer not in number:
            continue
        after = number.get(read.after, -1)
        for source, target in edges:
            if target > after:
                needed_S = holds_SN[:, source] & ~holds_SN[:, target]
                allowed_S &= ~(needed_S & ~holds_SN[:, number[read.layer]])
    return allowed_S


def reads_that_forbid(graph: LayerGraph, before: set[str]) -> list[tuple[ValueRead, str]]:
    """The value reads that a cut behind the layers in `before` would break, each with a layer used again after it."""
    order = {node.name: index for index, node in enumerate(graph.in_order())}
    inputs, _ = side_layers(graph)
    crossing = [(a, b) for a, b in graph.edges if a in before and b not in before and a not in inputs]
    again = [next((a for a, b in crossing if order[b] > order[read.after]), None) for read in graph.reads]
    return [
        (read, source)
        for read, source in zip(graph.reads, again, strict=True)
        if source is not None and read.layer not in before
    ]


def _thin(allowed_S: Bools, crossing_bytes_S: Floats, most: int) -> NDArray[np.int64]:
    """Which cuts to keep: all allowed ones, or the cheapest of each run where even those in order are too many."""
    (kept,) = np.nonzero(allowed_S)
    if len(kept) <= most + 1:
        return kept
    runs = np.array_split(kept[1:-1], most - 1)
    cheapest = [run[np.argmin(crossing_bytes_S[run])] for run in runs]
    return np.array([kept[0], *cheapest, kept[-1]])
