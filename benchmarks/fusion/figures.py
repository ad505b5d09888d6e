"""Pictures of what the benchmarks measured: speed-up curves, partial fusion, convergence. CSV files -> *PNG files*.

python benchmarks/fusion/figures.py DIR
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SERIAL = "serial eager"
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def speedups(rows: Iterable[Row], folder: Path) -> list[Path]:
    """For each workload: samples a second over those of one model after another, by the number of variants."""
    rows = [row for row in rows if row["samples_s"]]
    made = []
    for workload in sorted({row["workload"] for row in rows}):
        precisions = sorted({row["precision"] for row in rows if row["workload"] == workload})
        figure, axes = plt.subplots(1, len(precisions), figsize=(5.2 * len(precisions), 4), squeeze=False)
        for axis, precision in zip(axes[0], precisions, strict=True):
            own = [row for row in rows if row["workload"] == workload and row["precision"] == precision]
            serial = [float(row["samples_s"]) for row in own if row["mode"] == SERIAL]
            unit = serial[0] if serial else 1.0
            for mode in sorted({row["mode"] for row in own}):
                points = sorted(
                    (int(row["variants"]), float(row["samples_s"]) / unit) for row in own if row["mode"] == mode
                )
                label = f"FusionStrategy, {mode}" if mode in ("auto", "auto uncompiled") else mode
                if mode.startswith("serial"):
                    axis.axhline(points[0][1], linestyle=":", color="grey", label=label)
                else:
                    axis.plot(*zip(*points, strict=True), marker="o", label=label)
            axis.set(title=f"{workload}, {precision}", xlabel="variants", xscale="log")
            axis.set_xticks(counts := sorted({int(row["variants"]) for row in own}), [str(count) for count in counts])
            axis.set_ylabel(f"samples/s, {SERIAL} = 1" if serial else "samples/s")
            axis.legend(fontsize=7)
        made.append(_saved(figure, folder / f"speed_{workload}.png"))
    return made


def bars(rows: Iterable[Row], folder: Path) -> list[Path]:
    """All workloads side by side for the number of variants that most was measured for: ratios to serial eager."""
    rows = [row for row in rows if row["samples_s"]]
    if not rows:
        return []
    counts = [row["variants"] for row in rows]
    count = max(set(counts), key=counts.count)
    own = [row for row in rows if row["variants"] == count and row["precision"] == "bf16"]
    workloads, modes = sorted({row["workload"] for row in own}), sorted({row["mode"] for row in own})
    speeds = {(row["workload"], row["mode"]): float(row["samples_s"]) for row in own}
    figure, axis = plt.subplots(figsize=(10, 4))
    for place, mode in enumerate(modes):
        heights = [speeds.get((one, mode), 0.0) / speeds.get((one, SERIAL), float("inf")) for one in workloads]
        left = [index + 0.8 * place / len(modes) for index in range(len(workloads))]
        axis.bar(left, heights, 0.8 / len(modes), label=mode, align="edge")
    axis.set_xticks([index + 0.4 for index in range(len(workloads))], workloads)
    axis.set_ylabel(f"samples/s, {SERIAL} = 1")
    axis.set_title(f"{count} variants, bf16")
    axis.legend(fontsize=7)
    return [_saved(figure, folder / "speed.png")]


def partial(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Samples a second by how many parts of ResNet-18 run once a variant."""
    points = sorted((int(row["unfused"]), float(row["samples_s"]) / 1e3) for row in rows if row["samples_s"])
    if not points:
        return []
    figure, axis = plt.subplots(figsize=(5.2, 4))
    axis.plot(*zip(*points, strict=True), marker="o")
    axis.set(xlabel="parts of ResNet-18 that run once a variant", ylabel="thousand samples/s", ylim=(0, None))
    return [_saved(figure, folder / "partial.png")]


def convergence(rows: Iterable[Row], folder: Path) -> list[Path]:
    """Validation loss by epoch, a panel for each arithmetic: fused variants as lines, separate runs as points."""
    rows = list(rows)
    if not rows:
        return []
    kinds = list(dict.fromkeys(row.get("arithmetic", "tf32") for row in rows))
    figure, axes = plt.subplots(1, len(kinds), figsize=(6 * len(kinds), 4), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = [row for row in rows if row.get("arithmetic", "tf32") == kind]
        for place, lr in enumerate(sorted({row["lr"] for row in own})):
            for run, style in (("fused", "-"), ("separate", "o"), ("separate, other kernels", ":")):
                points = [
                    (int(row["epoch"]), float(row["val_loss"])) for row in own if row["lr"] == lr and row["run"] == run
                ]
                if points:
                    axis.plot(*zip(*sorted(points), strict=True), style, color=f"C{place}", label=f"lr {lr}, {run}")
        axis.set(title=kind, xlabel="epoch", ylabel="validation loss")
        axis.legend(fontsize=7)
    return [_saved(figure, folder / "convergence.png")]


def _saved(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    made = [
        *speedups(read(folder / "speed.csv"), folder),
        *bars(read(folder / "speed.csv"), folder),
        *partial(read(folder / "partial.csv"), folder),
        *convergence(read(folder / "convergence.csv"), folder),
    ]
    print("\n".join(map(str, made)))


if __name__ == "__main__":
    main()
