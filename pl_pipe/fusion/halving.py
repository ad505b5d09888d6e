"""When variants are left behind: successive halving, and Hyperband, which divides them among several halvings.

Pure decisions. The originals (Jamieson & Talwalkar 2016; Li et al., JMLR 2018) start those that are promoted anew; here
they go on from where they are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pl_pipe.errors import ConfigError


@dataclass(frozen=True)
class Rung:
    """After so many epochs, so many variants stay."""

    epochs: int
    keep: int


@dataclass(frozen=True)
class Bracket:
    """Variants, by number, that compete with one another."""

    numbers: tuple[int, ...]
    rungs: tuple[Rung, ...]


def halving(numbers: Sequence[int], *, factor: int = 3, first: int = 1, last: int) -> Bracket:
    """A rung after `first` epochs, then after `factor` times as many, …: each keeps one in `factor`."""
    if factor < 2 or first < 1:
        raise ConfigError(f"factor={factor} and first={first}; a halving takes a factor of 2 or more, and an epoch")
    rungs, epochs, keep = [], first, len(numbers)
    while keep > 1 and epochs < last:
        keep = max(1, keep // factor)
        rungs.append(Rung(epochs, keep))
        epochs *= factor
    return Bracket(tuple(numbers), tuple(rungs))


def hyperband(numbers: Sequence[int], *, factor: int = 3, last: int) -> tuple[Bracket, ...]:
    """Brackets from the most eager (many variants, halved early) to one in which all train to the end."""
    if factor < 2:
        raise ConfigError(f"factor={factor}; hyperband takes a factor of 2 or more")
    deepest = int(math.log(last) / math.log(factor) + 1e-9) if last > 1 else 0
    weights = [math.ceil((deepest + 1) / (s + 1) * factor**s) for s in range(deepest, -1, -1)]
    left, brackets = list(numbers), []
    for place, s in enumerate(range(deepest, -1, -1)):
        rest = sum(weights[place:])
        count = len(left) if s == 0 else min(len(left), max(1, round(len(left) * weights[place] / rest)))
        mine, left = left[:count], left[count:]
        if mine:
            brackets.append(halving(mine, factor=factor, first=max(1, last // factor**s), last=last))
    return tuple(brackets)


def left_behind(bracket: Bracket, epochs: int, values: Mapping[int, float], *, mode: str) -> list[int]:
    """Of the variants that are still there, with their values, those that leave after so many epochs.

    The last rung so far counts: where there were no values at it, it is made up for; otherwise nothing is left to do.
    """
    rung = next((rung for rung in reversed(bracket.rungs) if rung.epochs <= epochs), None)
    if rung is None:
        return []
    sign = -1.0 if mode == "max" else 1.0
    there = [number for number in bracket.numbers if number in values]
    ranked = sorted(there, key=lambda number: (math.isnan(values[number]), sign * values[number], number))
    return sorted(ranked[rung.keep :])
