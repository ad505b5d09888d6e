"""Rates of one run, by workload, way and number of variants. speed.csv -> *speeds* -> tables and pictures.

Rows before they told their run have that of their file's name. What trains one model has one rate for any number.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modes import ONE_MODEL, PEERS, PLAIN_LIGHTNING, SERIAL
from speed_rows import read

Row = dict[str, str]


def read_runs(folder: Path) -> list[Row]:
    """Of all runs in a folder, the latest last."""
    paths = [path for path in sorted(folder.glob("*.csv")) if path.stem != "speed"]
    rows = [
        {**row, "run": row.get("run") or path.stem}
        for path in (*paths, folder / "speed.csv")
        for row in read(path)
        if "workload" in row and "samples_s" in row
    ]
    return [row for row in rows if row["samples_s"]]


def of_run(rows: Sequence[Row], run: str | None = None) -> list[Row]:
    """By default of the last one. A run is one of one GPU: its rows on another count as another's."""
    if run is None and rows:
        run = rows[-1]["run"]
    own = [row for row in rows if row["run"] == run]
    if run is not None and not own:
        known = ", ".join(dict.fromkeys(row["run"] for row in rows)) or "none"
        raise SystemExit(f"there are no rows of a run {run!r}; there are those of {known}")
    return [row for row in own if row.get("gpu") == own[-1].get("gpu")]


@dataclass(frozen=True)
class Speeds:
    """Samples a second in one arithmetic."""

    by_cell: dict[tuple[str, str, int], list[float]]
    """All that were measured, by workload, mode and number of variants."""

    @classmethod
    def of(cls, rows: Sequence[Row], precision: str) -> "Speeds":
        found: dict[tuple[str, str, int], list[float]] = {}
        for row in rows:
            if row["precision"] == precision:
                count = 1 if row["mode"] in ONE_MODEL else int(row["variants"])
                found.setdefault((row["workload"], row["mode"], count), []).append(float(row["samples_s"]))
        return cls(found)

    @property
    def workloads(self) -> list[str]:
        return sorted({workload for workload, _, _ in self.by_cell})

    @property
    def modes(self) -> list[str]:
        """FusionStrategy's first, then its peers."""
        known = {mode for _, mode, _ in self.by_cell}
        return [
            *sorted(known - {*PEERS, PLAIN_LIGHTNING}),
            *(mode for mode in (*PEERS, PLAIN_LIGHTNING) if mode in known),
        ]

    def counts(self, workload: str | None = None) -> list[int]:
        """Numbers of variants that were trained together."""
        return sorted(
            {
                count
                for one, mode, count in self.by_cell
                if mode not in ONE_MODEL and (workload is None or one == workload)
            }
        )

    def common_count(self) -> int | None:
        """The largest that was measured for every workload; without one, the largest of those that most have."""
        have = {count: sum(count in self.counts(one) for one in self.workloads) for count in self.counts()}
        return max(have, key=lambda count: (have[count], count), default=None)

    def rates(self, workload: str, mode: str, count: int) -> list[float]:
        return self.by_cell.get((workload, mode, 1 if mode in ONE_MODEL else count), [])

    def rate(self, workload: str, mode: str, count: int) -> float | None:
        """The median of several."""
        found = self.rates(workload, mode, count)
        return statistics.median(found) if found else None

    def ratio(self, workload: str, mode: str, count: int, *, to: str = SERIAL) -> float | None:
        rate, unit = self.rate(workload, mode, count), self.rate(workload, to, count)
        return rate / unit if rate and unit else None
