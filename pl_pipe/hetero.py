"""How much later a worker is than it could be: unevenness by seed and rank. configuration -> *model* -> delays.

The same delays under any strategy, so that comparisons are fair.
"""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

from pl_pipe.checks import is_number
from pl_pipe.errors import ConfigError

PHASES = ("forward", "backward")


class DelayModel(Protocol):
    """One worker's delays; asked in the order of its steps, before each forward and each backward."""

    def delay_s(self, phase: str, compute_s: float) -> float:
        """
        Args:
            compute_s: what the worker computes for in a step, as far as that is known.
        """


def check_number(name: str, value: object, *, least: float, most: float = math.inf) -> float:
    if is_number(value) and least <= value <= most:
        return float(value)
    upper = "" if most == math.inf else f" to {most:g}"
    raise ConfigError(f"hetero.{name}={value!r}; give a number from {least:g}{upper}")


class LateAtRandom:
    """SD-Pipe's `--hetero X`: a chance of one in ten to sleep for X seconds, before each forward and each backward."""

    def __init__(self, *, rank: int, seed: int, delay_s: float, probability: float = 0.1) -> None:
        self._delay_s = check_number("delay_s", delay_s, least=0.0)
        self._probability = check_number("probability", probability, least=0.0, most=1.0)
        self._draw = Random(f"late/{seed}/{rank}")

    def delay_s(self, phase: str, compute_s: float) -> float:  # noqa: ARG002
        return self._delay_s if self._draw.random() < self._probability else 0.0


class SlowWorker:
    """Some workers take a multiple of their time, always."""

    def __init__(self, *, rank: int, ranks: list[int], factor: float) -> None:
        self._factor = check_number("factor", factor, least=1.0)
        self._is_slow = rank in ranks

    def delay_s(self, phase: str, compute_s: float) -> float:
        return (self._factor - 1) * compute_s if self._is_slow and phase == "backward" else 0.0


class SlowPeriods:
    """Every worker is slow for some steps now and then; lengths are drawn around their means."""

    def __init__(self, *, rank: int, seed: int, factor: float, slow_steps: float, usual_steps: float) -> None:
        self._factor = check_number("factor", factor, least=1.0)
        self._means = {
            True: check_number("slow_steps", slow_steps, least=1.0),
            False: check_number("usual_steps", usual_steps, least=1.0),
        }
        self._draw = Random(f"periods/{seed}/{rank}")
        self._is_slow = False
        self._left = self._length()

    def delay_s(self, phase: str, compute_s: float) -> float:
        if phase != "backward":
            return 0.0
        while not self._left:
            self._is_slow = not self._is_slow
            self._left = self._length()
        self._left -= 1
        return (self._factor - 1) * compute_s if self._is_slow else 0.0

    def _length(self) -> int:
        return round(self._draw.expovariate(1 / self._means[self._is_slow]))


@dataclass(frozen=True)
class _Delays:
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class Trace:
    """Recorded delays: a CSV file with columns rank, step, forward_s, backward_s; it begins again at its end."""

    def __init__(self, *, rank: int, path: str) -> None:
        self._delays = _read(Path(path), rank)
        self._steps = dict.fromkeys(PHASES, 0)

    def delay_s(self, phase: str, compute_s: float) -> float:  # noqa: ARG002
        known = self._delays.forward_s if phase == "forward" else self._delays.backward_s
        if not known:
            return 0.0
        step = self._steps[phase]
        self._steps[phase] += 1
        return known[step % len(known)]


def traced_ranks(path: str) -> list[int]:
    """Those that a file of recorded delays is about."""
    ranks = sorted({rank for rank, *_ in _rows(Path(path))})
    if not ranks:
        raise ConfigError(f"hetero.path={path} has no delays below its header; record some, or leave hetero out")
    return ranks


def _read(path: Path, rank: int) -> _Delays:
    mine = [row for row in _rows(path) if row[0] == rank]
    return _Delays(tuple(row[2] for row in mine), tuple(row[3] for row in mine))


def _rows(path: Path) -> list[tuple[int, int, float, float]]:
    """Rank, step and delays, in the order of ranks and steps."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = sorted(_row(row, f"line {reader.line_num}") for row in reader)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"hetero.path={path} cannot be read ({type(error).__name__}: {error}); it should be a CSV file with the "
            f"columns rank, step, forward_s and backward_s"
        ) from error
    for rank, _, *delays_s in rows:
        for delay_s in delays_s:
            if not 0 <= delay_s < math.inf:
                raise ConfigError(
                    f"hetero.path={path} has a delay of {delay_s:g} s for rank {rank}; give seconds, 0 or more"
                )
    return rows


def _row(row: dict[str, str], place: str) -> tuple[int, int, float, float]:
    for name in ("rank", "step", "forward_s", "backward_s"):
        if row.get(name) is None:
            raise ValueError(f"{place} has no {name}")
    return int(row["rank"]), int(row["step"]), float(row["forward_s"]), float(row["backward_s"])
