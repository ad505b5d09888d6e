"""The topologies that have names, after KungFu (OSDI'20). (ranks, hosts) -> *shapes* -> trees.

`hosts` gives each rank's host, by any name. The lowest rank of a host is its master, through which the others of that
host are reached.

    star        0 to all                         tree        stars on the hosts, a star of masters at the first
    multi_star  the same, at each master         binary_tree a heap over ranks, whatever their hosts
    ring        chains, one for each rank        binary_tree_star          stars on the hosts, a heap over masters
    clique      a star at each rank              multi_binary_tree_star    the same, the heap rotated for each master
"""

from collections.abc import Callable, Hashable, Sequence

from pl_pipe.comm.topology.trees import NATIVE, SumTree, Topology

Hosts = Sequence[Hashable]


def star(hosts: Hosts, *, root: int = 0) -> Topology:
    ranks = len(hosts)
    name = "star" if root == 0 else f"star@{root}"
    return Topology(name, ranks, (SumTree.both_ways([root] * ranks),))


def multi_star(hosts: Hosts) -> Topology:
    masters = _masters(hosts)
    return _through_masters("multi_star", hosts, [[first] * len(masters) for first in range(len(masters))])


def ring(hosts: Hosts) -> Topology:
    """Tree r sums along r+1 → r+2 → … → r, and tells r → r+1 → … → r-1."""
    ranks = len(hosts)
    trees = []
    for root in range(ranks):
        up = tuple(rank if rank == root else (rank + 1) % ranks for rank in range(ranks))
        down = tuple(rank if rank == root else (rank - 1) % ranks for rank in range(ranks))
        trees.append(SumTree(up, down))
    return Topology("ring", ranks, tuple(trees))


def clique(hosts: Hosts) -> Topology:
    ranks = len(hosts)
    return Topology("clique", ranks, tuple(SumTree.both_ways([root] * ranks) for root in range(ranks)))


def tree(hosts: Hosts) -> Topology:
    return _through_masters("tree", hosts, [[0] * len(_masters(hosts))])


def binary_tree(hosts: Hosts) -> Topology:
    return Topology("binary_tree", len(hosts), (SumTree.both_ways(_heap(len(hosts))),))


def binary_tree_star(hosts: Hosts) -> Topology:
    return _through_masters("binary_tree_star", hosts, [_heap(len(_masters(hosts)))])


def multi_binary_tree_star(hosts: Hosts) -> Topology:
    masters = len(_masters(hosts))
    heaps = []
    for shift in range(masters):
        heap = _heap(masters)
        heaps.append([(heap[(place - shift) % masters] + shift) % masters for place in range(masters)])
    return _through_masters("multi_binary_tree_star", hosts, heaps)


def native(hosts: Hosts) -> Topology:
    """The backend's own all_reduce."""
    return Topology(NATIVE, len(hosts), ())


SHAPES: dict[str, Callable[[Hosts], Topology]] = {
    "star": star,
    "multi_star": multi_star,
    "ring": ring,
    "clique": clique,
    "tree": tree,
    "binary_tree": binary_tree,
    "binary_tree_star": binary_tree_star,
    "multi_binary_tree_star": multi_binary_tree_star,
    NATIVE: native,
}


def _masters(hosts: Hosts) -> list[int]:
    return [rank for rank, host in enumerate(hosts) if host not in hosts[:rank]]


def _heap(size: int) -> list[int]:
    return [0 if place == 0 else (place - 1) // 2 for place in range(size)]


def _through_masters(name: str, hosts: Hosts, among_masters: Sequence[Sequence[int]]) -> Topology:
    """Trees whose ranks hang on their hosts' masters; `among_masters` are father arrays of places among these."""
    masters = _masters(hosts)
    trees = []
    for fathers in among_masters:
        whole = [masters[[hosts[master] for master in masters].index(host)] for host in hosts]
        for place, master in enumerate(masters):
            whole[master] = masters[fathers[place]]
        trees.append(SumTree.both_ways(whole))
    return Topology(name, len(hosts), tuple(trees))
