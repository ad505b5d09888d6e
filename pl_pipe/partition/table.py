"""The dynamic program, entry by entry: exact, for few members. level -> *table* -> optimizer. PipeDream, SOSP'19.

best[m][a, b] is the price of the segment between cuts a and b on m members: one stage on all of them, or a shorter
pipeline to a cut k on m - r of them and one more stage from k to b on r.
"""

import numpy as np

from pl_pipe.partition.cuts import Floats
from pl_pipe.partition.level import Chosen, LevelProblem

_TIE = 1 + 1e-12


class Table:
    """All prices; for the outermost level only of segments that start at the first layer."""

    def __init__(self, problem: LevelProblem, *, from_start_only: bool) -> None:
        self._problem = problem
        self._from_start_only = from_start_only
        self._later: dict[int, Floats] = {}
        self._best: list[Floats] = [np.empty(0)]  # no members: not used
        for members in range(1, problem.members + 1):
            self._best.append(self._row(members))

    @property
    def prices(self) -> Floats:
        """With all members: [S, S], or [1, S] from the start only."""
        return self._best[-1]

    def _row(self, members: int) -> Floats:
        problem = self._problem
        rows = slice(0, 1) if self._from_start_only else slice(None)
        best = np.full((1 if self._from_start_only else len(problem.cuts), len(problem.cuts)), np.inf)
        for replicas in self._whole(members):
            np.minimum(best, problem.first_price(replicas, members, (rows, slice(None))), out=best)
        if problem.use_fewer and members > 1:
            best = np.minimum(best, self._best[members - 1])
        for replicas in range(1, 2 if problem.straight and members > 1 else members):
            _extend(best, self._best[members - replicas], self._last(replicas, members))
        return best

    def _whole(self, members: int) -> range:
        """How many replicas a first stage that uses up `members` may have: all, or fewer where some may be idle."""
        most = 1 if self._problem.straight else members
        return range(1 if self._problem.use_fewer else members, most + 1)

    def _last(self, replicas: int, used: int) -> Floats:
        """Prices of all segments as a last stage; without a memory limit they do not depend on the members used."""
        problem, everywhere = self._problem, (slice(None), slice(None))
        if problem.depth_SS is not None:
            return problem.later_price(replicas, used, everywhere)
        if replicas not in self._later:
            self._later[replicas] = problem.later_price(replicas, used, everywhere)
        return self._later[replicas]

    def stages(self, start: int, end: int) -> list[Chosen]:
        """A best pipeline for one segment; among equals, late stages have few replicas and cuts are cheap to cross."""
        problem, row, members = self._problem, 0 if self._from_start_only else start, self._problem.members
        found: list[Chosen] = []
        while True:
            target = self._best[members][row, end] * _TIE
            while problem.use_fewer and members > 1 and self._best[members - 1][row, end] <= target:
                members -= 1
            for replicas in reversed(self._whole(members)):
                if problem.first_price(replicas, members, (start, end)) <= target:
                    return [Chosen(start, end, replicas), *reversed(found)]
            stage = self._last_stage(row, end, members, target)
            found.append(stage)
            end, members = stage.start, members - stage.replicas

    def _last_stage(self, row: int, end: int, members: int, target: float) -> Chosen:
        problem = self._problem
        for replicas in range(1, 2 if problem.straight else members):
            last = problem.later_price(replicas, members, (slice(None), end))
            (ties,) = np.nonzero(np.maximum(self._best[members - replicas][row], last) <= target)
            if len(ties):
                cheapest = ties[np.argmin(problem.cuts.crossing_bytes_S[ties])]
                return Chosen(int(cheapest), end, replicas)
        raise AssertionError("the table holds a price that none of its entries explains")


def _extend(best: Floats, shorter: Floats, last: Floats) -> None:
    """best[a, b] = min(best[a, b], min over k of max(shorter[a, k], last[k, b])), in place."""
    if len(best) == 1:
        np.minimum(best[0], np.maximum(shorter[0][:, None], last).min(axis=0), out=best[0])
        return
    for middle in range(1, len(last) - 1):  # cuts are sorted by size: a < k < b
        through = np.maximum(shorter[:middle, middle, None], last[middle, None, middle + 1 :])
        np.minimum(best[:middle, middle + 1 :], through, out=best[:middle, middle + 1 :])
