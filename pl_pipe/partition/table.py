"""The dynamic program, entry by entry: exact, for few members. level -> *table* -> optimizer. PipeDream, SOSP'19.

best[m][a, b] is the price of the segment between cuts a and b on m members: one stage on all of them, or a shorter
pipeline to a cut k on m - r of them and one more stage from k to b on r.
"""

import numpy as np

from pl_pipe.partition.cuts import Floats
from pl_pipe.partition.level import Below, Chosen, LevelProblem

_TIE = 1 + 1e-12


class Table:
    """All prices; for the outermost level only of segments that start at the first layer."""

    def __init__(self, problem: LevelProblem, *, from_start_only: bool, below: Below | None = None) -> None:
        """With `below`, what each segment's pipeline all-reduces is kept for the level above."""
        self._problem = problem
        self._from_start_only = from_start_only
        self._below = below
        self._reduced: list[tuple[Floats, Floats]] = []
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
        reduced = self._nothing_reduced()
        best = np.full((1 if self._from_start_only else len(problem.cuts), len(problem.cuts)), np.inf)
        for replicas in self._whole(members):
            prices = problem.first_price(replicas, members, (rows, slice(None)))
            _replace(best, prices, reduced, self._reduced_by(replicas))
        if problem.use_fewer and members > 1:
            _replace(best, self._best[members - 1], reduced, self._reduced[members - 2] if reduced else ())
        for replicas in range(1, 2 if problem.straight and members > 1 else members):
            shorter = self._best[members - replicas]
            if reduced:
                parts = zip(reduced, self._reduced[members - replicas - 1], self._reduced_by(replicas), strict=True)
                _extend(best, shorter, self._last(replicas, members), list(parts))
            else:
                _extend(best, shorter, self._last(replicas, members), [])
        if reduced:
            self._reduced.append((reduced[0], reduced[1]))
        return best

    def _nothing_reduced(self) -> tuple[Floats, ...]:
        if self._below is None:
            return ()
        return np.zeros_like(self._below.reduced_bytes_SS), np.zeros_like(self._below.reduced_square_bytes_SS)

    def _reduced_by(self, replicas: int) -> tuple[Floats, ...]:
        """What every segment as one stage of so many replicas all-reduces."""
        if self._below is None:
            return ()
        return self._below.reduced_bytes_SS / replicas, self._below.reduced_square_bytes_SS / replicas**2

    def above(self) -> Below:
        """What a whole group makes of each segment, for the next level."""
        reduced, squares = self._reduced[-1] if self._reduced else (self.prices, self.prices)
        return Below(self.prices, reduced, squares)

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


def _replace(best: Floats, prices: Floats, kept: tuple[Floats, ...], given: tuple[Floats, ...]) -> None:
    """Takes over the lower prices, and with them what belongs to them."""
    lower = prices < best
    np.copyto(best, prices, where=lower)
    for target, source in zip(kept, given, strict=True):
        np.copyto(target, source, where=lower)


def _extend(best: Floats, shorter: Floats, last: Floats, sums: list[tuple[Floats, Floats, Floats]]) -> None:
    """best[a, b] = min(best[a, b], min over k of max(shorter[a, k], last[k, b])), in place.

    `sums` are (kept, of the shorter pipeline, of the last stage): added up along with the prices taken over.
    """
    if len(best) == 1:
        np.minimum(best[0], np.maximum(shorter[0][:, None], last).min(axis=0), out=best[0])
        return
    for middle in range(1, len(last) - 1):  # cuts are sorted by size: a < k < b
        through = np.maximum(shorter[:middle, middle, None], last[middle, None, middle + 1 :])
        here = best[:middle, middle + 1 :]
        if not sums:
            np.minimum(here, through, out=here)
            continue
        lower = through < here
        np.copyto(here, through, where=lower)
        for kept, before, stage in sums:
            added = before[:middle, middle, None] + stage[middle, None, middle + 1 :]
            np.copyto(kept[:middle, middle + 1 :], added, where=lower)
