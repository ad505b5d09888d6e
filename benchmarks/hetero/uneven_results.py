"""What runs among uneven workers come to. comparison.py -> rows -> *medians, ranges, goals*, picture.

Only rows of one setting (machine, workers, length of steps …) are compared. Of the same run the last row counts.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("none", "slow", "late")
SPEED, TIME = "samples_per_s", "reached_s"
GOALS = (
    ("none", "allreduce", "ddp", SPEED, 0.97),
    ("none", "partial_reduce", "allreduce", SPEED, 0.95),
    ("slow", "partial_reduce", "allreduce", SPEED, 2.0),
    ("slow", "ad_psgd", "allreduce", SPEED, 2.0),
    ("slow", "partial_reduce", "allreduce", TIME, 1.2),
    ("slow", "ad_psgd", "allreduce", TIME, 1.2),
    ("late", "sdpipe", "pipedream", SPEED, 1.0),
    ("late", "sdpipe", "sdpipe wave D=0", SPEED, 1.0),
    ("late", "sdpipe", "sdpipe wave D=4", SPEED, 1.0),
    ("late", "sdpipe every 4", "sdpipe wave D=0", SPEED, 1.0),
    ("late", "sdpipe every 4", "sdpipe wave D=4", SPEED, 1.0),
    ("late", "sdpipe", "pipedream", TIME, 1.2),
    ("late", "sdpipe every 4", "pipedream", TIME, 1.2),
)
"""Kind, rule, the rule it is compared with, in what, and how many times as good it should be."""


@dataclass(frozen=True)
class Run:
    """One row."""

    hetero: str
    rule: str
    repeat: int
    step_ms: float
    accuracy_wanted: float
    samples_per_s: float
    reached_s: float
    """Seconds of training until it was accurate enough; nan where it never was."""
    accuracy: float
    """In the end."""
    epochs: int
    date: str
    machine: str
    load: str
    workers: int = 4
    epochs_at_most: int = 12
    left_out: int = 0
    """Epochs at the beginning that do not count in samples_per_s; in older rows all do."""

    @property
    def setting(self) -> tuple[Any, ...]:
        return (
            self.machine, self.workers, self.step_ms, self.accuracy_wanted, self.epochs_at_most, self.left_out
        )  # fmt: skip

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.setting, self.hetero, self.rule, self.repeat)


@dataclass(frozen=True)
class Spread:
    """The median, the least and the most of some repeats, and how many of them are finite."""

    median: float
    least: float
    most: float
    finite: int
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """NaN, what was never reached, is later than everything: a median must not depend on the order of repeats."""
        found = [math.inf if math.isnan(value) else value for value in values]
        finite = sum(map(math.isfinite, found))
        return cls(statistics.median(found), min(found), max(found), finite, len(found))

    def show(self, digits: int = 2) -> str:
        return f"{self.median:.{digits}f} ({self.least:.{digits}f} to {self.most:.{digits}f})"


def settled_rate(ends_s: Sequence[float], samples: Sequence[int], *, left_out: int) -> float:
    """Samples a second after the first epochs, which have what happens only once.

    Args:
        ends_s: seconds of training until each epoch's end.
        samples: of all ranks until then.
    """
    if left_out:
        return (samples[-1] - samples[left_out - 1]) / (ends_s[-1] - ends_s[left_out - 1])
    return samples[-1] / ends_s[-1]


def latest(rows: Iterable[Run]) -> list[Run]:
    return list({row.key: row for row in rows}.values())


def by_setting(rows: Iterable[Run]) -> dict[tuple[Any, ...], list[Run]]:
    found: dict[tuple[Any, ...], list[Run]] = {}
    for row in latest(rows):
        found.setdefault(row.setting, []).append(row)
    return found


def of_rule(rows: Iterable[Run], kind: str, rule: str) -> dict[int, Run]:
    """By repeat."""
    return {row.repeat: row for row in rows if (row.hetero, row.rule) == (kind, rule)}


def advantages(rows: Sequence[Run], kind: str, rule: str, base: str, what: str) -> list[float]:
    """How many times as good as `base` a rule was, for every repeat that has both: more samples, or less time."""
    ours, others = of_rule(rows, kind, rule), of_rule(rows, kind, base)
    return [_advantage(ours[repeat], others[repeat], what) for repeat in sorted(ours.keys() & others.keys())]


def _advantage(ours: Run, other: Run, what: str) -> float:
    mine, its = float(getattr(ours, what)), float(getattr(other, what))
    if what == SPEED:
        return mine / its
    if math.isnan(mine):
        return 0.0
    return math.inf if math.isnan(its) else its / mine


def table(rows: Sequence[Run], rules: Sequence[str]) -> Iterable[str]:
    """Of one setting."""
    first = rows[0]
    counted = "the first epoch left out" if first.left_out else "the first epoch included"
    yield (
        f"{first.machine}: {first.workers} workers, steps of {first.step_ms:g} ms, at most {first.epochs_at_most} "
        f"epochs; samples/s with {counted}"
    )
    yield (
        f"{'':5} {'rule':22} {'samples/s':>24} {'of allreduce':>20} {f's to {first.accuracy_wanted:.0%}':>24} "
        f"{'reached':>8} {'in the end':>11}"
    )
    for kind in KINDS:
        for rule in rules:
            found = list(of_rule(rows, kind, rule).values())
            if found:
                speed, reached = (Spread.of(getattr(row, name) for row in found) for name in (SPEED, TIME))
                shares = advantages(rows, kind, rule, "allreduce", SPEED)
                share = Spread.of(shares).show() if shares else ""
                accuracy = Spread.of(row.accuracy for row in found).median
                yield (
                    f"{kind:5} {rule:22} {speed.show(0):>24} {share:>20} {reached.show():>24} "
                    f"{f'{reached.finite} of {reached.count}':>8} {accuracy:>11.3f}"
                )


def goals(rows: Sequence[Run]) -> Iterable[str]:
    """One line for each goal whose two sides were measured; judged by the median over repeats."""
    for kind, rule, base, what, least in GOALS:
        found = advantages(rows, kind, rule, base, what)
        if found:
            spread = Spread.of(found)
            verdict = "met" if spread.median >= least else "missed"
            unit = "samples/s" if what == SPEED else "time to the accuracy"
            yield (
                f"{kind:5} {rule} against {base}, {unit}: {spread.show()} in {spread.count} repeat(s); "
                f"goal {least:g}: {verdict}"
            )


def draw(rows: Sequence[Run], rules: Sequence[str], path: Path) -> None:
    """Medians as bars, ranges as lines; nothing where no run was accurate enough."""
    from pl_pipe.report.charts import figure, stage_colour

    shown = [rule for rule in rules if any(row.rule == rule for row in rows)]
    labels = {SPEED: "samples/s", TIME: f"s to {rows[0].accuracy_wanted:.0%} accuracy"}
    with figure(path, width=12, height=7) as drawn:
        axes = drawn.subplots(len(labels), len(KINDS), sharey=True)
        for place, (name, label) in enumerate(labels.items()):
            for column, kind in enumerate(KINDS):
                axis = axes[place][column]
                spreads = {rule: _spread(rows, kind, rule, name) for rule in shown}
                bars = [0.0 if spread is None else spread.median for spread in spreads.values()]
                axis.barh(shown, bars, color=stage_colour(place))
                for rule, spread in spreads.items():
                    if spread is not None:
                        axis.plot([spread.least, spread.most], [rule, rule], color="#444444", linewidth=0.8)
                axis.set(xlabel=label, title=kind if place == 0 else None)
        axes[0][0].invert_yaxis()


def _spread(rows: Sequence[Run], kind: str, rule: str, name: str) -> Spread | None:
    found = of_rule(rows, kind, rule).values()
    spread = Spread.of(getattr(row, name) for row in found) if found else None
    return spread if spread is not None and math.isfinite(spread.most) else None
