"""Pictures of what the benchmarks measured: speed-up curves, partial fusion, convergence. CSV files -> *PNG files*.

    python benchmarks/fusion/figures.py DIR [--out docs/images] [--run NAME] [--variants 8]

Pictures of speed are of one run, by default the last one in DIR.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from modes import AUTO, AUTO_TUNED, AUTO_UNCOMPILED, ONE_MODEL, SERIAL
from speed_rows import read
from speeds import Row, Speeds, of_run, read_runs


def of_speed(rows: Sequence[Row], folder: Path, variants: int | None = None) -> list[Path]:
    """Of one run's rows."""
    return [*speedups(rows, folder), *bars(rows, folder, variants)]


def speedups(rows: Sequence[Row], folder: Path) -> list[Path]:
    """For each workload: samples a second over those of one model after another, by the number of variants."""
    precisions = sorted({row["precision"] for row in rows})
    speeds = {precision: Speeds.of(rows, precision) for precision in precisions}
    made = []
    for workload in sorted({row["workload"] for row in rows}):
        kinds = [precision for precision in precisions if workload in speeds[precision].workloads]
        figure, axes = plt.subplots(1, len(kinds), figsize=(5.2 * len(kinds), 4), squeeze=False)
        for axis, precision in zip(axes[0], kinds, strict=True):
            _draw_speedups(axis, speeds[precision], workload)
            axis.set_title(f"{workload}, {precision}")
        made.append(_saved(figure, folder / f"fusion_speed_{workload}.png"))
    return made


def _draw_speedups(axis: plt.Axes, speeds: Speeds, workload: str) -> None:
    counts = speeds.counts(workload)
    unit = speeds.rate(workload, SERIAL, 1)
    for mode in speeds.modes:
        found = [(count, speeds.rate(workload, mode, count)) for count in ([1] if mode in ONE_MODEL else counts)]
        points = [(count, rate / (unit or 1.0)) for count, rate in found if rate is not None]
        if points and mode in ONE_MODEL:
            axis.axhline(points[0][1], linestyle=":" if mode == SERIAL else "--", color="grey", label=_label(mode))
        elif points:
            axis.plot(*zip(*points, strict=True), marker="o", label=_label(mode))
    axis.set(xlabel="variants", xscale="log")
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.set_xticks([], minor=True)
    axis.set_ylabel(f"samples/s, {SERIAL} = 1" if unit else "samples/s")
    axis.legend(fontsize=7)


def _label(mode: str) -> str:
    return f"FusionStrategy, {mode}" if mode in (AUTO, AUTO_TUNED, AUTO_UNCOMPILED) else mode


def ratios(speeds: Speeds, count: int) -> dict[str, dict[str, float]]:
    """Multiples of serial eager, by mode and workload; of what has both rows in this run."""
    found: dict[str, dict[str, float]] = {}
    for mode in speeds.modes:
        for workload in speeds.workloads:
            ratio = speeds.ratio(workload, mode, count)
            if ratio is not None:
                found.setdefault(mode, {})[workload] = ratio
    return found


def bars(rows: Sequence[Row], folder: Path, count: int | None = None) -> list[Path]:
    """All workloads side by side in bf16, for the most variants that all of them have."""
    speeds = Speeds.of(rows, "bf16")
    count = count or speeds.common_count()
    by_mode = ratios(speeds, count) if count is not None else {}
    workloads = [one for one in speeds.workloads if any(one in found for found in by_mode.values())]
    if not workloads:
        return []
    figure, axis = plt.subplots(figsize=(10, 4))
    for place, (mode, heights) in enumerate(by_mode.items()):
        left = [index + 0.8 * place / len(by_mode) for index, one in enumerate(workloads) if one in heights]
        axis.bar(left, list(heights.values()), 0.8 / len(by_mode), label=_label(mode), align="edge")
    axis.set_xticks([index + 0.4 for index in range(len(workloads))], workloads)
    axis.set_ylabel(f"samples/s, {SERIAL} = 1")
    axis.set_title(f"{count} variants, bf16")
    axis.legend(fontsize=7)
    return [_saved(figure, folder / "fusion_speed.png")]


def partial(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Samples a second by how many parts of ResNet-18 run once a variant, of the last run."""
    told = ("run", "gpu", "variants", "precision", "mode")
    own = [row for row in rows if row["samples_s"] and all(row.get(name) == rows[-1].get(name) for name in told)]
    points = sorted({int(row["unfused"]): float(row["samples_s"]) / 1e3 for row in own}.items())
    if not points:
        return []
    figure, axis = plt.subplots(figsize=(5.2, 4))
    axis.plot(*zip(*points, strict=True), marker="o")
    axis.set(xlabel="parts of ResNet-18 that run once a variant", ylabel="thousand samples/s", ylim=(0, None))
    axis.set_title(f"{own[-1]['variants']} variants, {own[-1]['precision']}, {own[-1]['mode']}")
    return [_saved(figure, folder / "fusion_partial.png")]


def convergence(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Validation loss by epoch, a panel for each arithmetic: fused variants as lines, separate runs as points."""
    told = ("epochs", "images", "formulation", "schedule", "gpu")
    rows = [row for row in rows if all(row.get(name) == rows[-1].get(name) for name in told)]
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
    return [_saved(figure, folder / "fusion_convergence.png")]


def _saved(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="by default the same folder")
    parser.add_argument("--run", help="by default the last one")
    parser.add_argument("--variants", type=int, help="of the picture of all workloads; by default the most they have")
    options = parser.parse_args()
    folder, out = options.folder, options.out or options.folder
    out.mkdir(parents=True, exist_ok=True)
    rows = of_run(read_runs(folder), options.run)
    made = [
        *of_speed(rows, out, options.variants),
        *partial(read(folder / "partial.csv"), out),
        *convergence(read(folder / "convergence.csv") or read(folder / "h200_convergence.csv"), out),
    ]
    print("\n".join(map(str, made)))


if __name__ == "__main__":
    main()
