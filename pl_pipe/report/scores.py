"""Scores of a run's checkpoints: table, CSV and picture. `pl-pipe evaluate` -> *scores*."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.ticker import MaxNLocator
from rich.table import Table

from pl_pipe.report.charts import FORWARD, figure


@dataclass(frozen=True)
class Score:
    """What one checkpoint scored."""

    checkpoint: str
    """Its file's name without the ending."""
    epoch: int
    step: int
    metrics: dict[str, float]


def score_table(scores: Sequence[Score], *, title: str, main_metric: str) -> Table:
    """One row a checkpoint; the best by `main_metric` stands out."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("checkpoint", overflow="fold")
    for heading in ("epoch", "step", *_metric_names(scores)):
        table.add_column(heading, justify="right", no_wrap=True)
    best = max((score.metrics[main_metric] for score in scores), default=None)
    for score in scores:
        stands_out = len(scores) > 1 and score.metrics[main_metric] == best
        values = (f"{score.metrics[name]:.2f}" if name in score.metrics else "" for name in _metric_names(scores))
        table.add_row(
            score.checkpoint, str(score.epoch), str(score.step), *values, style="bold" if stands_out else None
        )
    return table


def write_scores(scores: Sequence[Score], path: Path) -> None:
    """`checkpoint,epoch,step,…` with one row a checkpoint and all digits."""
    names = _metric_names(scores)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["checkpoint", "epoch", "step", *names])
        for score in scores:
            values = [score.metrics.get(name, "") for name in names]
            writer.writerow([score.checkpoint, score.epoch, score.step, *values])


def draw_scores(scores: Sequence[Score], path: Path, *, title: str, main_metric: str) -> None:
    """The main metric by epoch."""
    with figure(path, width=7, height=4) as drawn:
        axes = drawn.add_subplot()
        epochs = [score.epoch for score in scores]
        values = [score.metrics[main_metric] for score in scores]
        axes.plot(epochs, values, marker="o", color=FORWARD)
        best = max(range(len(values)), key=values.__getitem__)
        axes.annotate(
            f"{values[best]:.2f}", (epochs[best], values[best]), xytext=(0, 6), textcoords="offset points", ha="center"
        )
        axes.margins(y=0.12)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(title=title, xlabel="epoch", ylabel=main_metric)
        axes.grid(alpha=0.3)


def _metric_names(scores: Sequence[Score]) -> list[str]:
    """All metrics, in the order in which they first came."""
    return list(dict.fromkeys(name for score in scores for name in score.metrics))
