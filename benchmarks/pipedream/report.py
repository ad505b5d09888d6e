"""Tables and pictures of what `speedup.py` measured: speedup.csv -> *report* -> docs/benchmarks.md, docs/images.

python benchmarks/pipedream/report.py
"""

import argparse
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rows import read
from speedup import WAYS, Row

DOCS = Path(__file__).parents[2] / "docs"
_PLACE = re.compile(r"(<!-- pipedream -->\n).*?(<!-- end -->)", re.DOTALL)


def by_setting(rows: list[Row]) -> Iterator[tuple[str, int, float, dict[str, Row]]]:
    """Rows that may be compared: those of the machine that data parallel was measured on."""
    for model, workers, gbit in dict.fromkeys((row.model, row.workers, row.gbit) for row in rows):
        here = {row.way: row for row in rows if (row.model, row.workers, row.gbit) == (model, workers, gbit)}
        if "ddp" in here:
            yield model, workers, gbit, {way: row for way, row in here.items() if row.machine == here["ddp"].machine}


def speedups(rows: list[Row]) -> str:
    """By model and link, in multiples of data parallel's speed: measured, and in brackets simulated."""
    others = [way for way in WAYS[2:] if any(row.way == way for row in rows)]
    lines = [
        "| model | workers | Gbit/s | DDP, ms | `plan=auto` | predicted | simulated | **measured** | of simulated |"
        + "".join(f" {way} |" for way in others),
        f"|{'---|' * (9 + len(others))}",
    ]
    for model, workers, gbit, of in by_setting(rows):
        if "auto" not in of:
            continue
        ddp, auto = of["ddp"], of["auto"]
        predicted, simulated, measured = (
            getattr(ddp, name) / getattr(auto, name) for name in ("predicted_s", "simulated_s", "measured_s")
        )
        compared = [
            f"{ddp.measured_s / of[way].measured_s:.2f} ({ddp.simulated_s / of[way].simulated_s:.2f})"
            if way in of
            else ""
            for way in others
        ]
        cells = [
            model, str(workers), f"{gbit:g}", f"{1e3 * ddp.measured_s:.0f}", auto.plan, f"{predicted:.2f}",
            f"{simulated:.2f}", f"**{measured:.2f}**", f"{measured / simulated:.0%}", *compared,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def errors(rows: list[Row]) -> str:
    """How far the simulator is from what was measured. (What torch's own stages do, it does not know.)"""
    rows = [row for row in rows if not row.way.startswith("torch ")]
    off = sorted(abs(row.simulated_s / row.measured_s - 1) for row in rows)
    if not off:
        return "nothing measured"
    spread = statistics.median(row.spread_s / row.measured_s for row in rows)
    settings = len({(row.model, row.workers, row.gbit) for row in rows})
    return (
        f"Simulated against measured over {len(off)} runs in {settings} settings (model × workers × rate): median "
        f"error {statistics.median(off):.1%}, worst {off[-1]:.1%}. Between the quickest and the slowest update of a "
        f"run: {spread:.1%} of a step in the median."
    )


def overlaps(rows: list[Row]) -> str:
    """Of the time in which ranks had messages under way, how much they computed; in brackets in the simulator."""
    ways = [way for way in WAYS if any(row.way == way and row.overlap >= 0 for row in rows)]
    if not ways:
        return "How far messages travel while the ranks compute is open: no run has a timeline."
    lines = [f"| model | workers | Gbit/s |{''.join(f' {way} |' for way in ways)}", f"|{'---|' * (3 + len(ways))}"]
    for model, workers, gbit in dict.fromkeys((row.model, row.workers, row.gbit) for row in rows if row.overlap >= 0):
        of = {row.way: row for row in rows if (row.model, row.workers, row.gbit) == (model, workers, gbit)}
        cells = [
            f"{of[way].overlap:.0%} ({of[way].overlap_simulated:.0%})" if way in of and of[way].overlap >= 0 else ""
            for way in ways
        ]
        lines.append(f"| {model} | {workers} | {gbit:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def regrets(rows: list[Row]) -> str:
    """How much slower than the best of the plain ways `plan=auto` is."""
    plain = ("ddp", "straight", "uniform")
    found = [
        (
            of["auto"].measured_s / min(of[way].measured_s for way in plain if way in of) - 1,
            f"{model}, {workers} workers, {gbit:g}",
        )
        for model, workers, gbit, of in by_setting(rows)
        if {"auto", "ddp", "straight"} <= set(of)
    ]
    with_uniform = sum({"auto", *plain} <= set(of) for *_, of in by_setting(rows))
    if not found:
        return (
            "How `plan=auto` compares with the best of data parallel, straight and uniform is open: in no setting are "
            "they measured."
        )
    worst, where = max(found)
    return (
        f"In {len(found)} setting(s) `plan=auto` is at worst {worst:+.1%} slower than the best of data parallel, "
        f"straight and uniform ({where} Gbit/s); uniform was measured in {with_uniform} of them."
    )


def measured_on(rows: list[Row]) -> str:
    """When and where, as far as the rows say."""
    parts = []
    for machine in sorted({row.machine for row in rows if row.machine}):
        dates = sorted(row.date for row in rows if row.machine == machine)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        parts.append(f"{len(dates)} runs measured on {when} ({machine})")
    if unknown := sum(not row.machine for row in rows):
        parts.append(f"{unknown} runs measured before rows noted their date and machine")
    return "; ".join(parts) + "."


def write_document(rows: list[Row], path: Path) -> None:
    """Puts the tables in their place."""
    hidden = (
        "Of the time in which ranks had messages under way, the share in which they computed, from the runs' "
        f"timelines (in brackets in the simulator, which is what model and links allow):\n\n{overlaps(rows)}"
    )
    text = f"{measured_on(rows)}\n\n{speedups(rows)}\n\n{errors(rows)}\n\n{regrets(rows)}\n\n{hidden}\n"
    content = path.read_text()
    assert _PLACE.search(content), f"{path} has no place for the tables"
    path.write_text(_PLACE.sub(lambda found: found[1] + text + found[2], content))


def draw_speedups(rows: list[Row], path: Path) -> None:
    """A panel a model: how many times data parallel's speed each way has, by the links' rate."""
    usual = statistics.mode(row.workers for row in rows)
    rows = [row for *_, of in by_setting(rows) for row in of.values() if row.workers == usual]
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
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    rows = read(Row, options.measured)
    print(f"{speedups(rows)}\n\n{errors(rows)}\n\n{regrets(rows)}\n\n{overlaps(rows)}")
    write_document(rows, options.docs / "benchmarks.md")
    draw_speedups(rows, options.docs / "images" / "pipedream_speedup.png")
    draw_errors(rows, options.docs / "images" / "pipedream_simulated.png")


if __name__ == "__main__":
    main()
