"""Who averaged with whom: a table of workers by workers, and how fast each is. counts -> *chart* -> PNG."""

from collections.abc import Mapping
from pathlib import Path

from pl_pipe.report.charts import figure, stage_colour


def draw_averaging(
    partners: Mapping[int, Mapping[int, int]], samples_per_s: Mapping[int, float], path: Path, *, title: str
) -> None:
    """Rows average with columns so many times; beside them the samples a second of the last epoch."""
    workers = sorted({*partners, *samples_per_s})
    counts = [[int(partners.get(one, {}).get(other, 0)) for other in workers] for one in workers]
    side = max(2.6, 0.45 * len(workers))
    with figure(path, width=2 * side + 1.5, height=side + 0.9) as drawn:
        table, speeds = drawn.subplots(1, 2)
        drawn.suptitle(title)
        table.imshow(counts, cmap="Blues", vmin=0)
        table.set(xlabel="averaged with rank", ylabel="rank", xticks=range(len(workers)), yticks=range(len(workers)))
        table.set_xticklabels(map(str, workers))
        table.set_yticklabels(map(str, workers))
        most = max((count for row in counts for count in row), default=0)
        for row, values in enumerate(counts):
            for column, count in enumerate(values):
                if row != column and len(workers) <= 16:
                    colour = "white" if count > most / 2 else "black"
                    table.text(column, row, str(count), ha="center", va="center", color=colour, fontsize=8)
        speeds.barh(
            range(len(workers)),
            [samples_per_s.get(worker, 0.0) for worker in workers],
            color=[stage_colour(worker) for worker in workers],
        )
        speeds.invert_yaxis()
        speeds.set(xlabel="samples/s in the last epoch", ylabel="rank", yticks=range(len(workers)))
        speeds.set_yticklabels(map(str, workers))
