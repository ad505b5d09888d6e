"""Other traffic on the star's centre: throughput by step, with and without adaptation. After KungFu's experiment.

    sudo -E .venv/bin/python benchmarks/adapt/interference.py

Four hosts and two spectators, which send to host0 from one step to another: the step that was under way when the
traffic had been set is the onset. Runs (`--runs`):

    adapting, not adapting      under traffic
    clique, ring                the same traffic, other topologies that stay: the best that can be had
    straggler                   adapting, no traffic, a worker that takes four times as long
    late straggler              the same, but it becomes slow at a step
    clean                       adapting, no traffic, links that give up to 10 % more or less, changed again and again

The last lines say within how many steps of the onset the traffic was detected, and the throughput was back at 90 % of
the best alternative's; after how many steps without traffic the first topology was taken back; and how often the
topology changed without a cause. They are computed from `interference.csv` alone, which has every step. Runs that ended
are not repeated. Runs with traffic are made once a seed, since connections that share a link share it otherwise each
time: the medians, and from where to where, come last. For clean steps in less time: several copies with `--runs clean
--clean-steps 500`, each with another seed and `--out`.
"""

import argparse
import csv
import json
import random
import statistics
import threading
from collections.abc import Sequence
from pathlib import Path

import series
from runs import (
    During,
    Failures,
    Row,
    RunError,
    draw_lines,
    keep_rows,
    last_step,
    of_setting,
    read_rows,
    setting_of,
    steps,
    trained_in,
    wait_for_step,
)

from pl_pipe.cluster import LabConfig, LinkConfig
from pl_pipe.cluster.link_text import parse_rate
from pl_pipe.lab import Lab

ADAPTING, NOT_ADAPTING, CLEAN = "adapting", "not adapting", "clean"
STRAGGLER, LATE_STRAGGLER = "straggler", "late straggler"
ALTERNATIVES = ("clique", "ring")
RUNS = (ADAPTING, NOT_ADAPTING, *ALTERNATIVES, STRAGGLER, LATE_STRAGGLER, CLEAN)
WITH_TRAFFIC = (ADAPTING, NOT_ADAPTING, *ALTERNATIVES)
SETTING = ("recipe", "settings", "batch", "rate", "traffic", "spectators", "target", "topology", "begin", "end", "seed")
HAPPENS = ("traffic", "spectators", "target", "begin", "end", "noise", "noise_s")
AXES = ("step", "samples_per_s")
TRAFFIC = "traffic.json"
TOLD = ("detected_within", "recovered_within", "reverted_within", "share_of_best")
WANTED = 0.9
"""Of what the best alternative gives."""


def main() -> None:
    options = _options()
    folder, failures = Path(options.out), Failures()
    told = []
    for place, seed in enumerate(options.seeds):
        options.seed = seed
        runs = [name for name in options.runs if name in WITH_TRAFFIC or place == 0]
        told += _of_seed(runs, options, folder, failures, is_first=place == 0)
    if len(told) > 1:
        for name in TOLD:
            values = [row[name] for row in told]
            print(f"{name}: {statistics.median(values):.3g}, from {min(values):.3g} to {max(values):.3g}")
    failures.end()


def _of_seed(
    runs: Sequence[str], options: argparse.Namespace, folder: Path, failures: Failures, *, is_first: bool
) -> list[dict[str, float | str]]:
    """What adapting gains in the runs of one seed, if it was among them. The first one's are drawn."""
    setting = setting_of(options, *SETTING)
    place = folder if is_first else folder / f"seed_{options.seed}"
    rows = read_rows(folder / "interference.csv")
    for name in runs:
        with failures.noted(f"{name}, seed {options.seed}"):
            found = [{"setting": setting, "run": name, **row} for row in _measured(name, options, place)]
            rows = keep_rows(folder / "interference.csv", found)
    by_run = of_setting(rows, setting)
    for name, found in by_run.items():
        _tell(name, found)
    shown = {name: by_run[name] for name in WITH_TRAFFIC if name in by_run}
    if shown and is_first:
        lines = {name: tuple([row[of] for row in found] for of in AXES) for name, found in shown.items()}
        marks = _marks(next(iter(shown.values())))
        draw_lines(folder / "interference.png", lines, x="step", y="samples a second", marks=marks)
    if ADAPTING not in by_run:
        return []
    told = numbers(by_run)
    print(json.dumps(told))
    keep_rows(folder / "interference_numbers.csv", [{"setting": setting, "run": ADAPTING, **told}])
    return [told]


def numbers(by_run: dict[str, list[Row]]) -> dict[str, float | str]:
    """What adapting gains; the best alternative is that of the topologies that stayed, under the same traffic."""
    rows = by_run[ADAPTING]
    rates = {name: series.settled_with_traffic(by_run[name]) for name in ALTERNATIVES if name in by_run}
    best = max(rates, key=rates.__getitem__, default="")
    best_rate = rates.get(best, float("nan"))
    alone = series.settled_with_traffic(by_run[NOT_ADAPTING]) if NOT_ADAPTING in by_run else float("nan")
    settled = series.settled_with_traffic(rows)
    return {
        "detected_within": series.detected_within(rows),
        "recovered_within": series.recovered_within(rows, WANTED * best_rate) if rates else float("nan"),
        "reverted_within": series.reverted_within(rows),
        "before": series.before_traffic(rows),
        "with_traffic": settled,
        "not_adapting": alone,
        "best_alternative": best,
        "best_alternative_gives": best_rate,
        "share_of_best": settled / best_rate,
        "alarms_without_traffic": len(series.without_cause(rows)),
    }


def _measured(name: str, options: argparse.Namespace, folder: Path) -> list[Row]:
    place = folder / name.replace(" ", "_")
    settings, count, during = _kind(name, options, folder)
    lab = LabConfig(hosts=4, devices_per_host=1, between=LinkConfig(rate=options.rate))
    lab.spectators = options.spectators
    command = [
        "fit", f"recipe={options.recipe}", "data=synthetic", f"data.batch_size={options.batch}",
        f"data.num_samples={4 * options.batch * count}", "trainer.limit_val_batches=0", "strategy=adaptive",
        "+logger.csv.flush_logs_every_n_steps=1", "callbacks=monitors", "callbacks.noise_scale=null",
        "callbacks.latencies=null", "callbacks.last=null", "callbacks.best=null", "callbacks.progress=null",
        "trainer.enable_model_summary=false", "trainer.max_epochs=1", f"trainer.max_steps={count}", "recipe.lr=0.001",
        f"seed={options.seed}", *settings, *options.settings,
    ]  # fmt: skip
    run = trained_in(lab, command, place, during, happens=setting_of(options, *HAPPENS) if during else "")
    began, ended = _traffic(place, count) if name in WITH_TRAFFIC else (count, count)
    events = series.events_of((run / "fit.log").read_text())
    return [
        {
            "step": row["step"],
            "samples_per_s": row["samples_per_s"],
            "traffic": int(began <= row["step"] < ended),
            "event": events.get(row["step"], ""),
        }
        for row in steps(run)
    ]


def _kind(name: str, options: argparse.Namespace, folder: Path) -> tuple[list[str], int, During | None]:
    """Settings of a run, its number of steps, and what happens meanwhile."""
    topology = name if name in ALTERNATIVES else options.topology
    adapts = name not in (NOT_ADAPTING, *ALTERNATIVES)
    settings = [f"strategy.topology={topology}", f"strategy.adapt={str(adapts).lower()}"]
    if name == STRAGGLER:
        return [*settings, "hetero=slow_worker", "hetero.ranks=[1]"], options.steps, None
    if name == LATE_STRAGGLER:
        trace = folder.resolve() / f"late_{options.late_s:g}_s_from_{options.begin}_to_{options.end}.csv"
        _write_delays(trace, options)
        return [*settings, "hetero=trace", f"hetero.path={trace}"], options.steps, None
    if name == CLEAN:
        return settings, options.clean_steps, lambda lab, _, over: _noise(lab, over, options)
    # what alternatives give is known when the traffic ends
    count = options.end if name in ALTERNATIVES else options.steps
    return settings, count, lambda lab, run, over: _send(lab, run, over, options)


def _send(lab: Lab, run: Path, over: threading.Event, options: argparse.Namespace) -> None:
    """Traffic from one step to another; notes which steps were under way when it had come, and gone."""
    noted: dict[str, int] = {}
    for name, step, rate in (("began", options.begin, options.traffic), ("ended", options.end, "0")):
        if not wait_for_step(run, step, over):
            return
        for number in range(options.spectators):
            lab.set_traffic(f"spectator{number}", options.target, rate)
        noted[name] = last_step(run) + 1
        (run.parent / TRAFFIC).write_text(json.dumps(noted))


def _traffic(place: Path, count: int) -> tuple[int, int]:
    file = place / TRAFFIC
    if not file.exists():
        raise RunError(f"the run ended before there was traffic; raise --steps and --end, or lower --begin ({place})")
    noted = json.loads(file.read_text())
    return noted["began"], noted.get("ended", count)


def _noise(lab: Lab, over: threading.Event, options: argparse.Namespace) -> None:
    """Links that give a little more, or less, than they did."""
    draw, bits = random.Random(options.seed), parse_rate(options.rate, name="rate")
    while not over.wait(options.noise_s):
        share = draw.uniform(1 - options.noise, 1 + options.noise)
        lab.set_link(draw.choice(lab.hosts), LinkConfig(rate=f"{bits * share / 1e6:.3f}mbit"))


def _write_delays(path: Path, options: argparse.Namespace) -> None:
    """Rank 1 is late in as many steps as there would be traffic."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("rank", "step", "forward_s", "backward_s"))
        for step in range(options.steps):
            writer.writerow((1, step, 0.0, options.late_s if options.begin <= step < options.end else 0.0))


def _tell(name: str, rows: list[Row]) -> None:
    rates = [row["samples_per_s"] for row in rows]
    parts = [f"{len(rows)} steps, {series.switches(rows)} switches, {statistics.median(rates):.2f} samples/s"]
    if series.onset(rows) is not None:
        parts.append(f"{series.before_traffic(rows):.2f} before traffic came in step {series.onset(rows)}")
        parts.append(f"{series.settled_with_traffic(rows):.2f} with it once settled")
    print(f"{name}: " + "; ".join(parts))
    for row in rows:
        if row["event"]:
            print(f"  after step {row['step']}, {'with' if row['traffic'] else 'without'} traffic: {row['event']}")


def _marks(rows: list[Row]) -> dict[float, str]:
    with_traffic = [row["step"] for row in rows if row["traffic"]]
    return {with_traffic[0]: "traffic", with_traffic[-1] + 1: "no traffic"} if with_traffic else {}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--recipe", default="mobilenet_v2")
    parser.add_argument("--settings", nargs="*", default=["recipe.width=0.25"])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--traffic", default="80mbit")
    parser.add_argument("--spectators", type=int, default=2, help="Each sends over a connection of its own.")
    parser.add_argument("--target", default="host0")
    parser.add_argument("--topology", default="star")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--begin", type=int, default=40, help="Traffic is asked for after this step.")
    parser.add_argument("--end", type=int, default=100)
    parser.add_argument("--late-s", type=float, default=1.0, help="By which the late straggler's backward is late.")
    parser.add_argument("--clean-steps", type=int, default=2000)
    parser.add_argument("--noise", type=float, default=0.1, help="Share of a link's rate that comes or goes.")
    parser.add_argument("--noise-s", type=float, default=0.3, help="From one change of a link to the next.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="Runs without traffic: the first only.")
    parser.add_argument("--out", default="outputs/adapt/interference")
    return parser.parse_args()


if __name__ == "__main__":
    main()
