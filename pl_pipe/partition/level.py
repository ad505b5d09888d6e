"""One level of the problem: divide a segment among the members of a level. cuts, costs -> *level* -> table, search."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pl_pipe.cluster import Level
from pl_pipe.partition.costs import CostModel, Segment, Term, price
from pl_pipe.partition.cuts import Cuts, Floats

Where = tuple[slice | int, slice | int]


class Chosen(NamedTuple):
    """The layers between two cuts, on so many members."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True, eq=False)
class LevelProblem:
    """Stages between cuts, each on some of `members` machines (or groups of machines), the slowest as fast as can be.

    Arrays are [S, S]: entry [a, b] is the segment between cuts a and b.
    """

    cuts: Cuts
    members: int
    first: list[Term]
    later: list[Term]
    depth_SS: Floats | None
    """How many mini-batches a stage has memory to keep besides the running one; None is no limit."""
    straight: bool
    use_fewer: bool

    def first_price(self, replicas: int, used: int, where: Where) -> Floats:
        """Prices of segments as the first stage; where members may be idle, more are used up than it has replicas."""
        return self._limited(price(_at(self.first, where), replicas), replicas, used, where)

    def later_price(self, replicas: int, used: int, where: Where) -> Floats:
        """Prices of segments as a later stage, with `used` members used up to its end."""
        return self._limited(price(_at(self.later, where), replicas), replicas, used, where)

    def pipeline_price(self, stages: list[Chosen]) -> float:
        """The slowest of stages that are known to be within the limits."""
        each = [
            price(_at(self.later if index else self.first, (stage.start, stage.end)), stage.replicas)
            for index, stage in enumerate(stages)
        ]
        return float(max(each))

    def _limited(self, prices: Floats, replicas: int, used: int, where: Where) -> Floats:
        possible = self.cuts.inside_SS[where]
        if self.depth_SS is not None:
            possible = possible & (-(-(self.members - used) // replicas) <= self.depth_SS[where])
        return np.where(possible, prices, np.inf)


def level_problem(
    cuts: Cuts,
    *,
    model: CostModel,
    link: Level,
    inner_members: int,
    below: "Below",
    depth_SS: Floats | None,
    straight: bool,
    use_fewer: bool,
) -> LevelProblem:
    """The problem at one level, on what the level below makes of each segment."""
    segment = segments(cuts, below)
    return LevelProblem(
        cuts=cuts,
        members=link.members,
        first=model.first(segment, link, inner_members=inner_members),
        later=model.later(segment, link),
        depth_SS=depth_SS,
        straight=straight,
        use_fewer=use_fewer,
    )


@dataclass(frozen=True, eq=False)
class Below:
    """What one member of a level makes of each segment: a worker, or a group of them with a pipeline of its own."""

    compute_s_SS: Floats
    reduced_bytes_SS: Floats
    reduced_square_bytes_SS: Floats

    @classmethod
    def workers(cls, cuts: Cuts) -> "Below":
        """Below the innermost level: each member is one worker."""
        parameters = difference(cuts.parameter_bytes_S)
        return cls(difference(cuts.compute_s_S), parameters, parameters)


def segments(cuts: Cuts, below: Below) -> Segment:
    """All segments; those that run backwards have costs that mean nothing."""
    plain_s = difference(cuts.compute_s_S)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(plain_s > 0, difference(cuts.forward_s_S) / plain_s, 0.0)
    crossing = np.broadcast_to(cuts.crossing_bytes_S, plain_s.shape)
    return Segment(
        compute_s=below.compute_s_SS,
        forward_share=np.clip(share, 0.0, 1.0),
        parameter_bytes=difference(cuts.parameter_bytes_S),
        reduced_bytes=below.reduced_bytes_SS,
        reduced_square_bytes=below.reduced_square_bytes_SS,
        arriving_bytes=crossing.T,
        leaving_bytes=crossing,
    )


def difference(sums_S: Floats) -> Floats:
    """[a, b]: the sum over the layers between cuts a and b."""
    return sums_S[None, :] - sums_S[:, None]


def _at(terms: list[Term], where: Where) -> list[Term]:
    return [term.where(where) for term in terms]
