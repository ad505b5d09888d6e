"""A topology as data: trees that sums climb and results descend. shapes -> *trees* -> rounds.

An array of fathers is a tree: `fathers[rank]` is whom the rank sends to, and the root is its own father.

    fathers 0 0 0 1      0            up: 3 sends to 1, which adds; 1 and 2 send to 0, which has the sum
                        / \\
                       1   2          down: 0 sends the sum to 1 and 2, 1 sends it to 3
                       |
                       3
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pl_pipe.errors import ConfigError

NATIVE = "native"


@dataclass(frozen=True)
class SumTree:
    """One way to sum: up a tree into its root, and down a tree to all. A ring's two trees are different chains."""

    up: tuple[int, ...]
    down: tuple[int, ...]

    @property
    def root(self) -> int:
        return next(rank for rank, father in enumerate(self.up) if rank == father)

    @classmethod
    def both_ways(cls, fathers: Sequence[int]) -> "SumTree":
        return cls(tuple(fathers), tuple(fathers))


@dataclass(frozen=True)
class Topology:
    """Who sends what to whom. With several trees, each carries its share of every tensor; with none, it is native."""

    name: str
    ranks: int
    trees: tuple[SumTree, ...] = field(repr=False)

    def __post_init__(self) -> None:
        for tree in self.trees:
            checked_fathers(tree.up, self.ranks)
            checked_fathers(tree.down, self.ranks)
            if tree.down[tree.root] != tree.root:
                raise ConfigError(
                    f"topology {self.name}: sums arrive at rank {tree.root}, which is not the root of the way down; "
                    f"give both ways the same root"
                )

    @property
    def is_native(self) -> bool:
        """Left to the backend's own all_reduce."""
        return not self.trees

    def digest(self) -> str:
        """Equal where the messages are."""
        return hashlib.sha256(repr((self.ranks, self.trees)).encode()).hexdigest()[:16]

    def links(self) -> set[tuple[int, int]]:
        """Pairs of ranks, the one that sends first."""
        found = set()
        for tree in self.trees:
            found |= {(rank, father) for rank, father in enumerate(tree.up) if rank != father}
            found |= {(father, rank) for rank, father in enumerate(tree.down) if rank != father}
        return found


def checked_fathers(fathers: Sequence[int], ranks: int) -> tuple[int, ...]:
    """The array, if it is one tree of all ranks."""
    shown = list(fathers)
    if len(shown) != ranks:
        raise ConfigError(
            f"the father array {shown} has {len(shown)} entries, there are {ranks} ranks; give one father a rank"
        )
    wrong = [rank for rank, father in enumerate(shown) if not isinstance(father, int) or not 0 <= father < ranks]
    if wrong:
        raise ConfigError(
            f"the father array {shown} gives rank {wrong[0]} the father {shown[wrong[0]]}; choose ranks from 0 to "
            f"{ranks - 1}"
        )
    roots = [rank for rank, father in enumerate(shown) if rank == father]
    if len(roots) != 1:
        raise ConfigError(
            f"the father array {shown} has {len(roots)} roots{f' ({roots})' if roots else ''}; one rank, and only one, "
            f"must be its own father"
        )
    for rank in range(ranks):
        seen = [rank]
        while shown[seen[-1]] != seen[-1]:
            seen.append(shown[seen[-1]])
            if seen[-1] in seen[:-1]:
                cycle = seen[seen.index(seen[-1]) :]
                raise ConfigError(
                    f"the father array {shown} has a cycle: {' -> '.join(map(str, cycle))}; every rank's fathers must "
                    f"lead to rank {roots[0]}"
                )
    return tuple(shown)


def children_of(fathers: Sequence[int]) -> list[list[int]]:
    """By rank, in the order of ranks: the order in which sums are added up."""
    children: list[list[int]] = [[] for _ in fathers]
    for rank, father in enumerate(fathers):
        if rank != father:
            children[father].append(rank)
    return children


def heights(fathers: Sequence[int]) -> list[int]:
    """How many messages follow each other below each rank."""
    found = [0] * len(fathers)
    for rank in range(len(fathers)):
        above, height = rank, 0
        while fathers[above] != above:
            above, height = fathers[above], height + 1
            found[above] = max(found[above], height)
    return found


def depths(fathers: Sequence[int]) -> list[int]:
    """How many messages follow each other between the root and each rank."""
    found = []
    for rank in range(len(fathers)):
        above, depth = rank, 0
        while fathers[above] != above:
            above, depth = fathers[above], depth + 1
        found.append(depth)
    return found
