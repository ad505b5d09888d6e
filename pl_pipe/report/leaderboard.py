"""Variants compared: a table, a CSV file, a picture of their curves. records -> *leaderboard* -> people."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pl_pipe.report.charts import figure, stage_colour

Curves = dict[int, dict[str, list[tuple[int, float]]]]
"""Values of each variant's metrics, with the steps after which they were logged."""
TRAINED = "trained"
"""To the end: the status that need not be told."""
DIVERGED = "diverged"
"""To the end, where not all of its weights are finite numbers."""
_COLUMNS = 3
_WIDE = 10_000
_LISTED = 16
"""More variants than this have no legend."""


@dataclass(frozen=True)
class Row:
    number: int
    choice: dict[str, Any]
    """Hyper-parameters of its own."""
    status: str
    steps: int
    best: float | None
    """Of the monitored metric."""
    best_step: int | None
    last: dict[str, float]
    """Of all metrics."""
    has_diverged: bool = False
    """What it once was is lost with its weights."""


@dataclass(frozen=True)
class Leaderboard:
    """The variants, the best first, and those that have diverged last."""

    rows: tuple[Row, ...]
    monitor: str | None
    mode: str = "min"
    names: tuple[str, ...] = field(default=())
    """Of hyper-parameters in which variants differ."""

    @classmethod
    def ranked(cls, rows: Sequence[Row], *, monitor: str | None, mode: str) -> "Leaderboard":
        sign = -1.0 if mode == "max" else 1.0

        def rank(row: Row) -> tuple[bool, bool, float, int]:
            has_none = row.best is None or math.isnan(row.best)
            return row.has_diverged, has_none, 0.0 if has_none else sign * float(row.best or 0.0), row.number

        names = tuple(dict.fromkeys(name for row in rows for name in row.choice))
        return cls(tuple(sorted(rows, key=rank)), monitor, mode, names)

    @property
    def best(self) -> Row:
        return self.rows[0]

    def table(self, width: int | None = None) -> Table:
        """With as many metrics as a terminal of that width has room for; all of them are in the file."""
        metrics = self._shown()
        made = self._table(metrics)
        while width is not None and metrics and Console(width=_WIDE).measure(made).minimum > width:
            metrics = metrics[:-1]
            made = self._table(metrics)
        return made

    def _table(self, metrics: Sequence[str]) -> Table:
        table = Table(title=f"{len(self.rows)} variants by {self.monitor or 'number'}", title_justify="left")
        for name in ("variant", *self.names, f"best {self.monitor or ''}".strip(), "at step"):
            table.add_column(name, justify="right", overflow="fold")
        for name in (*(f"last {name}" for name in metrics), "steps"):
            table.add_column(name, justify="right", overflow="fold")
        told = [row.status for row in self.rows if row.status != TRAINED]
        if told:
            table.add_column("status", min_width=max(len(word) for status in told for word in status.split()))
        for row in self.rows:
            table.add_row(
                str(row.number),
                *(_text(row.choice.get(name)) for name in self.names),
                _text(row.best),
                _text(row.best_step),
                *(_text(row.last.get(name)) for name in metrics),
                str(row.steps),
                *([] if not told else ["" if row.status == TRAINED else row.status]),
            )
        return table

    def write_csv(self, path: Path) -> None:
        """`variants.csv`: one line a variant, the best first."""
        metrics = sorted({name for row in self.rows for name in row.last})
        heads = ["variant", *self.names, f"best {self.monitor}", "best step", *(f"last {name}" for name in metrics)]
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*heads, "steps", "status"])
            for row in self.rows:
                values = [row.choice.get(name, "") for name in self.names]
                last = [row.last.get(name, "") for name in metrics]
                best = ["" if value is None else value for value in (row.best, row.best_step)]
                writer.writerow([row.number, *values, *best, *last, row.steps, row.status])

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            settings = ", ".join(f"{name}={value}" for name, value in row.choice.items()) or "as given"
            best = "" if row.best is None else f": {self.monitor} {row.best:.5g} after step {row.best_step}"
            last = row.last.get(self.monitor or "")  # which is its checkpoint's
            ends = "" if last is None else f", {last:.5g} at the end"
            lines.append(f"variant {row.number} ({settings}){best}{ends}, {row.steps} steps, {row.status}")
        return "\n".join(lines)

    def _shown(self) -> list[str]:
        """The metrics of a table that fits a terminal."""
        names = dict.fromkeys(name for row in self.rows for name in row.last)
        return [name for name in names if not name.endswith(("_step", "_epoch"))][:_COLUMNS]


def draw_curves(curves: Curves, labels: Mapping[int, str], path: Path) -> None:
    """One picture with a panel for each metric and a line for each variant."""
    names = sorted({name for of_one in curves.values() for name in of_one if not name.endswith(("_step", "_epoch"))})
    if not names:
        return
    across = min(_COLUMNS, len(names))
    down = math.ceil(len(names) / across)
    with figure(path, width=4.5 * across + 1.5, height=3.2 * down + 0.6) as drawn:
        panels = list(drawn.subplots(down, across, squeeze=False).flat)
        for panel, name in zip(panels, names, strict=False):
            for number, of_one in sorted(curves.items()):
                points = of_one.get(name, [])
                steps, values = [step for step, _ in points], [value for _, value in points]
                marker = "o" if len(points) < 30 else ""
                panel.plot(
                    steps, values, marker=marker, markersize=3, color=stage_colour(number), label=labels.get(number)
                )
            panel.set_title(name, fontsize="medium")
            panel.set_xlabel("step")
            panel.spines[["top", "right"]].set_visible(False)
        for panel in panels[len(names) :]:
            panel.set_axis_off()
        if 1 < len(curves) <= _LISTED:
            handles, texts = drawn.axes[0].get_legend_handles_labels()
            drawn.legend(handles, texts, loc="outside lower center", ncols=min(4, len(curves)), fontsize="small")


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
