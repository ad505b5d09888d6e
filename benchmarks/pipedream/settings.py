"""Runs that may be compared: rows of `speedup.py` -> *settings* -> report."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from speedup import WAYS, Row


@dataclass(frozen=True)
class Runs:
    """All runs of one way in one setting; times of a mini-batch in seconds."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "Runs":
        """Those of the last one's plan; and none from before mini-batches were counted, where there are others."""
        rows = [row for row in rows if row.minibatches] or rows
        plan = rows[-1].plan, rows[-1].predicted_s
        return cls(tuple(row for row in rows if (row.plan, row.predicted_s) == plan))

    @property
    def way(self) -> str:
        return self.rows[-1].way

    @property
    def plan(self) -> str:
        return self.rows[-1].plan

    @property
    def predicted_s(self) -> float:
        return self.rows[-1].predicted_s

    @property
    def simulated_s(self) -> float:
        return self.rows[-1].simulated_s

    def is_program_of(self, other: "Runs") -> bool:
        """Whether both trained by the same plan in our pipeline; Lightning's DDP is a program of its own."""
        return "ddp" not in (self.way, other.way) and (self.plan, self.predicted_s) == (other.plan, other.predicted_s)

    @property
    def measured_s(self) -> float:
        """The median; the quickest and the slowest are beside it."""
        return statistics.median(row.measured_s for row in self.rows)

    @property
    def quickest_s(self) -> float:
        return min(row.measured_s for row in self.rows)

    @property
    def slowest_s(self) -> float:
        return max(row.measured_s for row in self.rows)

    @property
    def overlap(self) -> float:
        """As the row's: below 0 where no run recorded it."""
        return statistics.median([row.overlap for row in self.rows if row.overlap >= 0] or [-1.0])

    @property
    def overlap_simulated(self) -> float:
        return self.rows[-1].overlap_simulated


@dataclass(frozen=True)
class Setting:
    """One model over one kind of link on one machine, and its runs by way."""

    machine: str
    model: str
    workers: int
    gbit: float
    runs: dict[str, Runs]

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, {self.gbit:g} Gbit/s"


def settings_of(rows: Sequence[Row]) -> list[Setting]:
    """In the order in which they were first measured."""

    def setting(row: Row) -> tuple[str, str, int, float]:
        return row.machine, row.model, row.workers, row.gbit

    found = []
    for asked in dict.fromkeys(map(setting, rows)):
        here = [row for row in rows if setting(row) == asked]
        by_way = {way: [row for row in here if row.way == way] for way in WAYS}
        found.append(Setting(*asked, runs={way: Runs.of(of) for way, of in by_way.items() if of}))
    return found
