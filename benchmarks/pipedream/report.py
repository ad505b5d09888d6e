"""Tables and pictures of what `speedup.py` measured: its rows -> *report* -> docs/benchmarks.md, docs/images.

    python benchmarks/pipedream/report.py                               # --measured A.csv B.csv

Several files are taken together: those of copies that ran side by side, or of several machines. Only runs on the same
machine are compared, so every machine has tables of its own. Runs of the same way in the same setting, wherever they
are, count as its repeats.
"""

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rows import read
from settings import Runs, Setting, settings_of
from speedup import WAYS, Row, schedule_of

from pl_pipe.schedule import FLUSHING

DOCS = Path(__file__).parents[2] / "docs"
MEDIAN_GOAL, WORST_GOAL = 0.10, 0.25
"""How far the planner and the simulator may be off."""
_PLACE = re.compile(r"(<!-- pipedream -->\n).*?(<!-- end -->)", re.DOTALL)


def speedups(settings: Sequence[Setting]) -> str:
    """By model and link, in multiples of data parallel's speed: measured, and in brackets simulated.

    Ranges are of the extremes: data parallel's quickest run against the way's slowest, and the other way round.
    """
    others = [way for way in WAYS[2:] if any(way in setting.runs for setting in settings)]
    lines = [
        "| model | workers | Gbit/s | runs | DDP, ms | `plan=auto` | predicted | simulated | **measured** "
        "| of simulated |" + "".join(f" {way} |" for way in others),
        f"|{'---|' * (10 + len(others))}",
    ]
    for setting in settings:
        if not {"ddp", "auto"} <= set(setting.runs):
            continue
        ddp, auto = setting.runs["ddp"], setting.runs["auto"]
        predicted, simulated, measured = (
            getattr(ddp, name) / getattr(auto, name) for name in ("predicted_s", "simulated_s", "measured_s")
        )
        several = len(ddp.rows) > 1 or len(auto.rows) > 1
        extremes = f" ({ddp.quickest_s / auto.slowest_s:.2f} to {ddp.slowest_s / auto.quickest_s:.2f})"
        compared = [
            f"{ddp.measured_s / of.measured_s:.2f} ({ddp.simulated_s / of.simulated_s:.2f})" if of else ""
            for of in map(setting.runs.get, others)
        ]
        counts = dict.fromkeys((len(ddp.rows), len(auto.rows)))
        cells = [
            setting.model, str(setting.workers), f"{setting.gbit:g}", " and ".join(map(str, counts)),
            f"{1e3 * ddp.measured_s:.0f}", auto.plan, f"{predicted:.2f}", f"{simulated:.2f}",
            f"**{measured:.2f}**{extremes if several else ''}", f"{measured / simulated:.0%}", *compared,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_simulated(way: str) -> bool:
    """What torch's own stages do the simulator does not know."""
    return not way.startswith("torch ")


def is_priced(way: str) -> bool:
    """The planner prices pipelines without flushes."""
    return is_simulated(way) and schedule_of(way) not in FLUSHING


KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "simulator": ("simulated_s", is_simulated),
    "planner": ("predicted_s", is_priced),
}
"""Who says how long a mini-batch takes, under which name, and of which ways."""


def errors(settings: Sequence[Setting]) -> str:
    """How far simulator and planner are from what was measured, against the goals; data parallel and others apart."""
    parts = [_verdict(settings, who) for who in KINDS]
    runs = [of for setting in settings for of in setting.runs.values()]
    within = statistics.median(row.spread_s / row.measured_s for of in runs for row in of.rows)
    parts.append(
        "Between the quickest and the slowest stretch of a run, each of a mini-batch a worker or of a round if that is "
        f"more (in older rows: an update): {within:.1%} of a step in the median."
    )
    if several := [of for of in runs if len(of.rows) > 1]:
        between = statistics.median((of.slowest_s - of.quickest_s) / of.measured_s for of in several)
        parts.append(
            f"Between the quickest and the slowest run of {len(several)} ways that were measured several times: "
            f"{between:.1%} in the median."
        )
    return f"{' '.join(parts)}\n\n{_by_way(runs)}"


def _verdict(settings: Sequence[Setting], who: str) -> str:
    name, knows = KINDS[who]
    off = [
        (abs(getattr(of, name) / of.measured_s - 1), f"{setting}, {way}")
        for setting in settings
        for way, of in setting.runs.items()
        if knows(way)
    ]
    if not off:
        return f"How far the {who} is off is open: nothing that it knows was measured."
    middle, (worst, where) = statistics.median(error for error, _ in off), max(off)
    met = {True: "met", False: "missed"}
    count = sum(any(map(knows, setting.runs)) for setting in settings)
    return (
        f"The {who} is off by {middle:.1%} in the median (goal: at most {MEDIAN_GOAL:.0%}, "
        f"{met[middle <= MEDIAN_GOAL]}) and by {worst:.1%} at worst (goal: at most {WORST_GOAL:.0%}, "
        f"{met[worst <= WORST_GOAL]}; {where}), over {len(off)} cases in {count} settings (model × workers × rate)."
    )


def _by_way(runs: Sequence[Runs]) -> str:
    """What part of a speed-up is that data parallel has more overhead here than the pipelines."""
    lines = ["| way | settings | measured / simulated (range) | measured / predicted (range) |", "|---|---|---|---|"]
    groups = {way: [of for of in runs if of.way == way] for way in WAYS}
    groups["all but ddp and torch's"] = [of for of in runs if of.way != "ddp" and is_simulated(of.way)]
    for title, group in groups.items():
        if any(map(is_simulated, (of.way for of in group))):
            cells = [title, str(len(group)), *(_ratios(group, who) for who in KINDS)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratios(runs: Iterable[Runs], who: str) -> str:
    name, knows = KINDS[who]
    found = [of.measured_s / getattr(of, name) for of in runs if knows(of.way)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else ""


def overlaps(settings: Sequence[Setting]) -> str:
    """Of the time in which ranks had messages under way, how much they computed; in brackets in the simulator."""
    recorded = [
        (setting, {way: of for way, of in setting.runs.items() if of.overlap >= 0})
        for setting in settings
        if any(of.overlap >= 0 for of in setting.runs.values())
    ]
    ways = [way for way in WAYS if any(way in of for _, of in recorded)]
    if not ways:
        return "How far messages travel while the ranks compute is open: no run has a timeline."
    lines = [f"| model | workers | Gbit/s |{''.join(f' {way} |' for way in ways)}", f"|{'---|' * (3 + len(ways))}"]
    for setting, of in recorded:
        cells = [f"{of[way].overlap:.0%} ({of[way].overlap_simulated:.0%})" if way in of else "" for way in ways]
        lines.append(f"| {setting.model} | {setting.workers} | {setting.gbit:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def regrets(settings: Sequence[Setting]) -> str:
    """How much slower than the best of the plain ways `plan=auto` is; one of the same plan is the same program."""
    compared = [setting for setting in settings if {"auto", "ddp", "straight"} <= set(setting.runs)]
    if not compared:
        return (
            "How `plan=auto` compares with the best of data parallel, straight and uniform is open: in no setting are "
            "they measured."
        )
    found, same = [], []
    for setting in compared:
        auto = setting.runs["auto"]
        others = [setting.runs[way] for way in ("ddp", "straight", "uniform") if way in setting.runs]
        same += [abs(auto.measured_s / of.measured_s - 1) for of in others if of.is_program_of(auto)]
        best_s = min(of.measured_s for of in others if not of.is_program_of(auto))
        found.append((auto.measured_s / best_s - 1, str(setting)))
    worst, where = max(found)
    with_uniform = sum("uniform" in setting.runs for setting in compared)
    text = (
        f"In {len(found)} setting(s) `plan=auto` is at worst {worst:+.1%} slower than the best of data parallel, "
        f"straight and uniform ({where}); uniform was measured in {with_uniform} of them."
    )
    if same:
        text += (
            f" Not among these comparisons: {len(same)} time(s) `auto` is the straight or the uniform plan itself, "
            f"and what was measured of the two, the same program twice, differs by up to {max(same):.1%}."
        )
    return text


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


def text_of(rows: Sequence[Row]) -> str:
    """Machine by machine."""
    parts = []
    for machine in dict.fromkeys(row.machine for row in rows):
        of = [row for row in rows if row.machine == machine]
        settings = settings_of(of)
        hidden = (
            "Of the time in which ranks had messages under way, the share in which they computed, from the runs' "
            f"timelines (in brackets in the simulator, which is what model and links allow):\n\n{overlaps(settings)}"
        )
        parts += [measured_on(of), speedups(settings), errors(settings), regrets(settings), hidden]
    return "\n\n".join(parts)


def write_document(rows: Sequence[Row], path: Path) -> None:
    """Puts the tables in their place."""
    text = f"{text_of(rows)}\n"
    content = path.read_text()
    assert _PLACE.search(content), f"{path} has no place for the tables"
    path.write_text(_PLACE.sub(lambda found: found[1] + text + found[2], content))


def draw_speedups(settings: Sequence[Setting], path: Path) -> None:
    """A panel a model: how many times data parallel's speed each way has, by the links' rate.

    Of the machine and the number of workers that most settings are of.
    """
    settings = [setting for setting in settings if "ddp" in setting.runs]
    if not settings:
        return
    usual = statistics.mode((setting.machine, setting.workers) for setting in settings)
    settings = [setting for setting in settings if (setting.machine, setting.workers) == usual]
    models = list(dict.fromkeys(setting.model for setting in settings))
    figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.2), squeeze=False, layout="constrained")
    for panel, model in zip(panels[0], models, strict=True):
        by_rate = sorted((of for of in settings if of.model == model), key=lambda setting: setting.gbit)
        for number, way in enumerate(WAYS[1:]):  # a way has one colour in all panels
            found = [(of.gbit, of.runs["ddp"], of.runs[way]) for of in by_rate if way in of.runs]
            if not found:
                continue
            gbits = [gbit for gbit, *_ in found]
            measured = [ddp.measured_s / of.measured_s for _, ddp, of in found]
            extremes = [
                [speed - ddp.quickest_s / of.slowest_s for speed, (_, ddp, of) in zip(measured, found, strict=True)],
                [ddp.slowest_s / of.quickest_s - speed for speed, (_, ddp, of) in zip(measured, found, strict=True)],
            ]
            panel.errorbar(gbits, measured, yerr=extremes, fmt="o-", ms=4, capsize=2, color=f"C{number}", label=way)
            if way == "auto":
                simulated = [ddp.simulated_s / of.simulated_s for _, ddp, of in found]
                panel.plot(gbits, simulated, "--", color=f"C{number}", label="auto, simulated")
        panel.axhline(1.0, color="grey", linewidth=0.8)
        panel.set(title=model, xscale="log", xlabel="links, Gbit/s", xticks=[setting.gbit for setting in by_rate])
        panel.get_xaxis().set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        panel.minorticks_off()
    panels[0][0].set_ylabel("speed, of Lightning's DDP")
    panels[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=130)


def draw_errors(settings: Sequence[Setting], path: Path) -> None:
    """Each way in each setting as a point: what simulator and planner say against what was measured."""
    figure, panels = plt.subplots(1, len(KINDS), figsize=(4.2 * len(KINDS), 4), sharey=True, layout="constrained")
    runs = [of for setting in settings for of in setting.runs.values()]
    ends = [f(1e3 * of.measured_s for of in runs) for f in (min, max)]
    for panel, (who, (name, knows)) in zip(panels, KINDS.items(), strict=True):
        for number, way in enumerate(WAYS):
            found = [of for of in runs if of.way == way and knows(way)]
            panel.plot(
                [1e3 * getattr(of, name) for of in found], [1e3 * of.measured_s for of in found], "o", ms=4,
                color=f"C{number}", label=way if found else None,
            )  # fmt: skip
        panel.plot(ends, ends, color="grey", linewidth=0.8)
        panel.set(xscale="log", yscale="log", xlabel=f"{name.removesuffix('_s')}, ms a mini-batch", title=who)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("measured")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", nargs="+", type=Path, default=[Path(__file__).parent / "speedup.csv"])
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    if absent := [str(path) for path in options.measured if not path.exists()]:
        parser.error(f"--measured: there is no {', '.join(absent)}; measure first, by speedup.py --out")
    rows = [row for path in options.measured for row in read(Row, path)]
    if not rows:
        parser.error(f"--measured: no rows in {', '.join(map(str, options.measured))}")
    print(text_of(rows))
    write_document(rows, options.docs / "benchmarks.md")
    settings = settings_of(rows)
    draw_speedups(settings, options.docs / "images" / "pipedream_speedup.png")
    draw_errors(settings, options.docs / "images" / "pipedream_simulated.png")


if __name__ == "__main__":
    main()
