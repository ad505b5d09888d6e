"""What each rank sends and receives, round by round. trees -> *rounds* -> summing.

A tensor is cut into pieces, which follow each other through their tree. In a round a rank first sends what it is to
send, then waits for what it is to receive; what it sends needs only what came in earlier rounds, so nobody waits for
ever.

    a chain 2 → 1 → 0, two pieces a, b     round 0    1        2        3        4
                                 rank 2    a up      b up              a ◄      b ◄
                                 rank 1    + a       a up, + b  b up   a ◄, …   …
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from pl_pipe.comm.topology.trees import SumTree, Topology, children_of, depths, heights


class Piece(NamedTuple):
    """Elements of the tensor."""

    start: int
    stop: int


class Transfer(NamedTuple):
    """One message, as the rank sees it that sends or receives it."""

    peer: int
    piece: Piece
    number: int
    """The same on both sides, and no other message's of this sum."""
    adds: bool
    """On its way up: the receiver adds it. On its way down it takes the place of what is there."""


@dataclass(frozen=True)
class Round:
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    """In the order in which they are added up."""


Program = tuple[Round, ...]
"""Of one rank."""


@lru_cache(maxsize=256)
def compile_rounds(topology: Topology, elements: int, *, most_elements: int) -> tuple[Program, ...]:
    """Every rank's program for a tensor of so many elements, in pieces of at most `most_elements`."""
    ranks = topology.ranks
    sends: list[dict[int, list[Transfer]]] = [{} for _ in range(ranks)]
    receives: list[dict[int, list[Transfer]]] = [{} for _ in range(ranks)]
    number = 0

    def send(turn: int, source: int, target: int, piece: Piece, *, adds: bool) -> None:
        nonlocal number
        sends[source].setdefault(turn, []).append(Transfer(target, piece, number, adds))
        receives[target].setdefault(turn, []).append(Transfer(source, piece, number, adds))
        number += 1

    for tree, share in zip(topology.trees, _divided(Piece(0, elements), len(topology.trees)), strict=True):
        count, messages = -(-(share.stop - share.start) // most_elements), _messages(tree)
        for turn, piece in enumerate(_divided(share, count)):
            for when, source, target, adds in messages:
                send(turn + when, source, target, piece, adds=adds)
    programs = []
    for rank in range(ranks):
        turns = sorted(sends[rank].keys() | receives[rank].keys())
        programs.append(
            tuple(
                Round(
                    # each rank begins with another one, so that not all send to the same
                    tuple(sorted(sends[rank].get(turn, ()), key=lambda one: ((one.peer - rank) % ranks, one.number))),
                    tuple(receives[rank].get(turn, ())),
                )
                for turn in turns
            )
        )
    return tuple(programs)


def _messages(tree: SumTree) -> list[tuple[int, int, int, bool]]:
    """(round, from, to, whether it is added) of one piece, in the order in which a rank adds up its children's."""
    up, down = heights(tree.up), depths(tree.down)
    top = up[tree.root]
    found = []
    for father, children in enumerate(children_of(tree.up)):
        found += [(up[child], child, father, True) for child in children]
    for father, children in enumerate(children_of(tree.down)):
        found += [(top + down[father], father, child, False) for child in children]
    return sorted(found)


def _divided(piece: Piece, parts: int) -> Sequence[Piece]:
    """Nearly equal parts, in order."""
    if not parts:
        return []
    length = piece.stop - piece.start
    edges = [piece.start + length * part // parts for part in range(parts + 1)]
    return [Piece(start, stop) for start, stop in pairwise(edges)]
