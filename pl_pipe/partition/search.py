"""The same optimum for many members, by search over the price. level -> *search* -> optimizer.

The table's work grows with the square of the number of members. Here a price T is given and the question is which
numbers of members can serve the layers up to a cut with every stage at most T. Prices fall as a stage's replicas grow
from 2 on, so for one more stage the possible numbers are r = 1, where that is cheap enough, and all from some least r
on. The numbers that serve a cut are thus a set whose largest part is "all from c on": bits, and a few operations on
them for each pair of cuts. The least T that serves all layers is found by halving; each success is replaced by the
price of the pipeline it found, so the search ends on a price that a pipeline really has.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pl_pipe.partition.costs import Term, price
from pl_pipe.partition.cuts import Floats
from pl_pipe.partition.level import Chosen, LevelProblem

Ints = NDArray[np.int64]

_CLOSE = 1e-12
"""Relative: two prices nearer than this are one."""
_NARROW = 1e-6
"""Relative: from here on the search asks first whether anything better exists at all."""


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Segments as a list, those that end at cut b from `begins[b]` to `begins[b + 1]`; only the real ones."""

    starts: Ints
    begins: Ints
    terms: list[Term]
    depth: Ints | None
    """How many mini-batches each may keep waiting; None is no limit."""

    def least_replicas(self, target: float, members: int) -> tuple[NDArray[np.bool_], Ints]:
        """Whether one replica is cheap enough, and the least number from 2 on that is (members + 1 where none)."""
        one = price(self.terms, 1) <= target
        least = np.full(len(self.starts), 2, dtype=np.int64)
        for term in self.terms:
            np.maximum(least, _least(term, target, members), out=least)
        return one, least


def _least(term: Term, target: float, members: int) -> Ints:
    """The least r >= 2 with (s+c)/r - q/r² <= target: the larger root of target r² - (s+c) r + q = 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        root = term.share / target
        if term.reduce.any():
            both = term.share + term.reduce
            root = (both + np.sqrt(np.maximum(both * both - 4 * target * term.reduce_square, 0.0))) / (2 * target)
        least: Floats = np.clip(np.ceil(root * (1 - 1e-12)), 2, members + 1)
        missed = (term.share + term.reduce) / least - term.reduce_square / (least * least) > target  # rounding
    found: Ints = np.minimum(least.astype(np.int64) + missed, members + 1)
    return found


class Search:
    """Solves one level from the first layer on."""

    def __init__(self, problem: LevelProblem) -> None:
        self.problem = problem
        self.members = problem.members
        ends, starts = np.nonzero(problem.cuts.inside_SS.T)  # sorted by end
        self.later = self._pairs(starts[starts > 0], ends[starts > 0], problem.later)
        self.first = self._pairs(starts[starts == 0], ends[starts == 0], problem.first)
        self.from_on = _bits_from_on(problem.members)

    def _pairs(self, starts: Ints, ends: Ints, terms: list[Term]) -> _Pairs:
        depth_SS = self.problem.depth_SS
        return _Pairs(
            starts=starts,
            begins=np.searchsorted(ends, np.arange(len(self.problem.cuts) + 1)),
            terms=[term.where((starts, ends)) for term in terms],
            depth=None if depth_SS is None else np.clip(depth_SS[starts, ends], -1, self.members).astype(np.int64),
        )

    def solve(self) -> tuple[float, list[Chosen]] | None:
        """The least price and a pipeline that has it; None where no pipeline is within the limits."""
        found = self._attempt(np.finfo(float).max / 16)
        if found is None:
            return None
        high, stages = found
        low = float(self.problem.first[0].share[0, -1]) / self.members  # all compute, perfectly divided
        while high - low > _CLOSE * high:
            narrow = high - low <= _NARROW * high
            middle = high * (1 - _CLOSE) if narrow else (low + high) / 2
            found = self._attempt(middle)
            if found is not None:
                high, stages = found
            elif narrow:
                break
            else:
                low = middle
        return high, stages

    def _attempt(self, target: float) -> tuple[float, list[Chosen]] | None:
        reach = _Reach(self, target)
        if not reach.serves_all():
            return None
        stages = reach.stages()
        return self.problem.pipeline_price(stages), stages


class _Reach:
    """For one price: by cut, the numbers of members that serve all layers up to it, as bits."""

    def __init__(self, search: Search, target: float) -> None:
        self._search, members, cuts = search, search.members, len(search.problem.cuts)
        self._later_one, self._later_least = search.later.least_replicas(target, members)
        first_one, first_least = search.first.least_replicas(target, members)
        if search.problem.straight:
            self._later_least[:] = members + 1
            first_least[:] = members + 1
        self._served = np.zeros((cuts, search.from_on.shape[1]), dtype=np.uint64)
        self._fewest = np.full(cuts, members + 1, dtype=np.int64)
        self._alone = self._from_on(np.zeros_like(first_least), first_least, search.first.depth)
        self._first_one_at = np.where(first_one, 1, members + 1)
        if search.first.depth is not None:
            enough = np.maximum(members - search.first.depth, 1)  # members behind which its memory suffices
            if not search.problem.use_fewer:  # none can be idle before it
                enough = np.where(enough == 1, 1, members + 1)
            self._first_one_at = np.where(first_one & (search.first.depth >= 0), enough, members + 1)
        for cut in range(1, cuts):
            self._fill(cut)

    def _fill(self, cut: int) -> None:
        search = self._search
        here = slice(search.later.begins[cut], search.later.begins[cut + 1])
        depth = None if search.later.depth is None else search.later.depth[here]
        starts = search.later.starts[here]
        start = int(self._alone[cut - 1])  # every cut but the empty one has one segment from the start
        if len(starts):
            start = min(start, int(self._from_on(self._fewest[starts], self._later_least[here], depth).min()))
        served = search.from_on[start].copy()
        (ones,) = np.nonzero(self._later_one[here])
        if len(ones):
            before = self._served[starts[ones]]
            if depth is not None:
                before = before & self._enough(depth[ones])
            served |= _up_by_one(np.bitwise_or.reduce(before, axis=0))
        one_at = int(self._first_one_at[cut - 1])
        served[one_at // 64] |= np.uint64(1) << np.uint64(one_at % 64)
        served &= search.from_on[0]
        self._fewest[cut] = fewest = _lowest(served, search.members)
        self._served[cut] = search.from_on[fewest] if search.problem.use_fewer else served

    def _from_on(self, fewest: Ints, least: Ints, depth: Ints | None) -> Ints:
        """Numbers of members from which on one more stage of two or more replicas is possible."""
        beyond = self._search.members + 1
        found: Ints = np.minimum(fewest + least, beyond)
        if depth is None:
            return found
        waiting = -(-(beyond - 1 - fewest) // np.maximum(depth + 1, 1))  # so many replicas keep the memory limit
        possible = (depth >= 0) & (fewest < beyond)
        return np.where(possible, np.minimum(fewest + np.maximum(least, waiting), beyond), beyond)

    def _enough(self, depth: Ints) -> NDArray[np.uint64]:
        """The numbers before a stage of one replica with which its memory suffices."""
        members = self._search.members
        return self._search.from_on[np.clip(members - depth - 1, 0, members + 1)]

    def serves_all(self) -> bool:
        return bool(_has(self._served[-1], self._search.members))

    def stages(self) -> list[Chosen]:
        search, cut, used = self._search, len(self._search.problem.cuts) - 1, self._search.members
        found: list[Chosen] = []
        while cut:  # idle members may stand before any stage
            if search.problem.use_fewer:
                used = int(self._fewest[cut])
            stage = self._last_stage(cut, used)
            found.append(stage)
            cut, used = stage.start, used - stage.replicas
        return found[::-1]

    def _last_stage(self, cut: int, used: int) -> Chosen:
        """A stage that ends at `cut`, with `used` members up to it; of the possible cuts the cheapest to cross."""
        search = self._search
        if self._alone[cut - 1] <= used:
            return Chosen(0, cut, used)
        if self._first_one_at[cut - 1] == used:
            return Chosen(0, cut, 1)
        here = slice(search.later.begins[cut], search.later.begins[cut + 1])
        depth = None if search.later.depth is None else search.later.depth[here]
        starts = search.later.starts[here]
        many = self._from_on(self._fewest[starts], self._later_least[here], depth) <= used
        before = self._served[starts] if depth is None else self._served[starts] & self._enough(depth)
        single = self._later_one[here] & _has(before, used - 1)
        (options,) = np.nonzero(many | single)
        best = options[np.argmin(search.problem.cuts.crossing_bytes_S[starts[options]])]
        start = int(starts[best])
        return Chosen(start, cut, used - int(self._fewest[start]) if many[best] else 1)


def _bits_from_on(members: int) -> NDArray[np.uint64]:
    """Row c: the numbers from c to `members`, one bit each."""
    numbers = np.arange(((members + 1) // 64 + 1) * 64)  # room for members + 1, which stands for never
    bits = (numbers[None, :] >= np.arange(members + 2)[:, None]) & (numbers[None, :] <= members)
    return np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64)


def _has(bits: NDArray[np.uint64], number: int) -> NDArray[np.bool_]:
    return (bits[..., number // 64] >> np.uint64(number % 64) & np.uint64(1)).astype(bool)


def _up_by_one(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every number one higher."""
    carried = np.zeros_like(bits)
    carried[1:] = bits[:-1] >> np.uint64(63)
    return (bits << np.uint64(1)) | carried


def _lowest(bits: NDArray[np.uint64], members: int) -> int:
    """The least number in the set, or one more than all."""
    words: list[int] = bits.tolist()
    for index, word in enumerate(words):
        if word:
            return min(index * 64 + (word & -word).bit_length() - 1, members + 1)
    return members + 1


def seconds_of_search(cuts: int) -> float:
    """About how long a search takes; the optimizer compares it with the table's time."""
    return 30 * (cuts * cuts * 40e-9 + cuts * 40e-6)


def seconds_of_table(cuts: int, members: int) -> float:
    return 0.5 * members * members * cuts * cuts * 2e-9
