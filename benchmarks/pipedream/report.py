"""Tables and pictures of what `speedup.py` measured: speedup.csv -> *report* -> docs/images, standard output.

python benchmarks/pipedream/report.py
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from speedup import WAYS, Row, errors, read, table

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def draw_speedups(rows: list[Row], path: Path) -> None:
    """A panel a model: how many times data parallel's speed each way has, by the links' rate."""
    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.2), squeeze=False, layout="constrained")
    for panel, model in zip(panels[0], models, strict=True):
        data_parallel = {row.gbit: row for row in rows if row.model == model and row.way == "ddp"}
        for way in WAYS[1:]:
            found = sorted((row for row in rows if (row.model, row.way) == (model, way)), key=lambda row: row.gbit)
            found = [row for row in found if row.gbit in data_parallel]
            if not found:
                continue
            gbits = [row.gbit for row in found]
            (line,) = panel.plot(
                gbits, [data_parallel[row.gbit].measured_s / row.measured_s for row in found], "o-", label=way
            )
            if way == "auto":
                simulated = [data_parallel[row.gbit].simulated_s / row.simulated_s for row in found]
                panel.plot(gbits, simulated, "--", color=line.get_color(), label="auto, simulated")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(title=model, xscale="log", xlabel="links, Gbit/s", xticks=sorted(data_parallel))
        panel.get_xaxis().set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        panel.minorticks_off()
    panels[0][0].set_ylabel("speed, of Lightning's DDP")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def draw_errors(rows: list[Row], path: Path) -> None:
    """Each run as a point: what the simulator says against what was measured."""
    figure, panel = plt.subplots(figsize=(4.2, 4), layout="constrained")
    for way in WAYS:
        found = [row for row in rows if row.way == way]
        panel.plot(
            [1e3 * row.simulated_s for row in found], [1e3 * row.measured_s for row in found], "o", ms=4, label=way
        )
    ends = [f(1e3 * row.measured_s for row in rows) for f in (min, max)]
    panel.plot(ends, ends, color="grey", linewidth=0.8)
    panel.set(xscale="log", yscale="log", xlabel="simulated, ms a mini-batch", ylabel="measured")
    panel.legend(fontsize=7)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=Path(__file__).parent / "speedup.csv")
    parser.add_argument("--images", type=Path, default=IMAGES)
    options = parser.parse_args()
    rows = read(options.measured)
    print(f"{table(rows)}\n\n{errors(rows)}")
    draw_speedups(rows, options.images / "pipedream_speedup.png")
    draw_errors(rows, options.images / "pipedream_simulated.png")


if __name__ == "__main__":
    main()
