"""The tree of the quickest links. measured latencies -> *minimum spanning tree* -> topology."""

import math
from collections.abc import Sequence

import networkx as nx

from pl_pipe.comm.topology.trees import SumTree, Topology
from pl_pipe.errors import ConfigError


def minimum_spanning_tree(latencies_s: Sequence[Sequence[float]]) -> Topology:
    """From a matrix of latencies, row by row what each rank measured; both directions of a pair are averaged.

    The root is the rank from which the farthest one is nearest.
    """
    ranks = len(latencies_s)
    for rank, row in enumerate(latencies_s):
        if len(row) != ranks:
            raise ConfigError(f"rank {rank} measured {len(row)} latencies, there are {ranks} ranks; measure all pairs")
        bad = [peer for peer in range(ranks) if peer != rank and not (math.isfinite(row[peer]) and row[peer] >= 0)]
        if bad:
            raise ConfigError(
                f"the latency from rank {rank} to rank {bad[0]} is {row[bad[0]]} s; measure it again, it must be a "
                f"number of at least 0"
            )
    if ranks == 1:
        return Topology("minimum_spanning_tree", 1, (SumTree.both_ways([0]),))
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(range(ranks))
    for one in range(ranks):
        for other in range(one):
            graph.add_edge(one, other, latency_s=(latencies_s[one][other] + latencies_s[other][one]) / 2)
    spanning = nx.minimum_spanning_tree(graph, weight="latency_s")
    farthest = {
        rank: max(nx.single_source_dijkstra_path_length(spanning, rank, weight="latency_s").values())
        for rank in range(ranks)
    }
    root = min(range(ranks), key=lambda rank: (farthest[rank], rank))
    fathers = [root] * ranks
    for father, rank in nx.bfs_edges(spanning, root):
        fathers[rank] = father
    return Topology("minimum_spanning_tree", ranks, (SumTree.both_ways(fathers),))
