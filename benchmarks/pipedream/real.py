"""Pipelines against data parallelism with real compute, over rehearsed links: pace, and time to an accuracy.

    sudo -E .venv/bin/python benchmarks/pipedream/real.py           # --hosts 2 --models vgg16 --mbit 100

VGG-16 at a quarter of its width on handwritten digits of 32 x 32, and eight residual LSTMs of 256, on hosts that share
this machine's cores; so the work is the same in all ways, and what differs is what the links cost. Every update is of
the same number of samples: data parallel gives each rank its share, a plan with replicas has a round of mini-batches
(`update=round`), a straight pipeline takes them as one mini-batch.

| way | |
|---|---|
| ddp | Lightning's DDP |
| auto | `strategy=pipedream` by the plan that the planner makes for these links from a profile of this machine |
| straight | the same with one host a stage |

`samples/s` is the median over the epochs after the first, and of repeats the median with the range. For vgg16,
`to accuracy` is the time of the first validation with at least `--accuracy`, beginning with the first batch: that
asynchronous updates are worth less is in it. A run that does not come to it takes forever, also in the median. Runs are
repeated `--repeats` times, ways in turn; medians are printed.

Rows are added to `--out` as they come; what was stopped goes on where it stood, rows of another machine are not taken
for done, and `--again` measures anew and replaces row by row. A run that fails is told and the others go on; then the
program ends with an error that names it. `--tables A.csv B.csv` prints what copies side by side have measured, and
measures nothing.
"""

import argparse
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from failures import Failures
from hosts import Hosts
from ranks import REAL
from rows import PAYLOAD, put, read, this_machine, today

from pl_pipe.cluster import Cluster
from pl_pipe.partition import Plan, write_plan
from pl_pipe.strategies.pipeline.plan_choice import choose_plan

WAYS = ("ddp", "auto", "straight")
SAMPLES_AN_UPDATE = 96
TIMEOUT_S = 900.0


@dataclass
class Row:
    """One training."""

    model: str
    hosts: int
    mbit: float
    way: str
    plan: str
    repeat: int
    samples_per_s: float
    to_accuracy_s: float
    """NaN where it was not reached, or nothing is validated."""
    best_accuracy: float
    accuracy: float
    """That was to be reached."""
    epochs: int
    date: str = ""
    machine: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.machine, self.model, self.hosts, self.mbit, self.way, self.repeat, self.accuracy, self.epochs


def planned(model: str, way: str, hosts: int, mbit: float) -> Plan:
    torch.manual_seed(0)
    module, data = REAL[model](SAMPLES_AN_UPDATE // hosts)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    cluster = Cluster.flat(hosts, PAYLOAD * mbit * 1e6 / 8)
    plan = choose_plan(
        module, batch, devices=hosts, device=torch.device("cpu"), cluster=cluster,
        plan="straight" if way == "straight" else "auto",
    )  # fmt: skip
    if SAMPLES_AN_UPDATE % plan.round:
        raise ValueError(f"{plan.shape} has rounds of {plan.round}, which do not divide {SAMPLES_AN_UPDATE} samples")
    return plan


def trained(
    hosts: Hosts, model: str, mbit: float, way: str, *, plan: Plan | None, epochs: int, accuracy: float, repeat: int
) -> Row:
    at_once = len(hosts) if plan is None else plan.round
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        if plan is not None:
            write_plan(plan, file)
        ranks = hosts.run(
            "trained", timeout_s=TIMEOUT_S, model=model, plan=None if plan is None else str(file), epochs=epochs,
            batch_size=SAMPLES_AN_UPDATE // at_once, seed=repeat,
        )  # fmt: skip
    found = ranks[0]
    reached = [at_s for at_s, accurate in found["accuracies"] if accurate >= accuracy]
    return Row(
        model=model,
        hosts=len(hosts),
        mbit=mbit,
        way=way,
        plan="-" if plan is None else plan.shape,
        repeat=repeat,
        samples_per_s=statistics.median(found["samples_per_s"][1:]),
        to_accuracy_s=reached[0] if reached else float("nan"),
        best_accuracy=max((accurate for _, accurate in found["accuracies"]), default=float("nan")),
        accuracy=accuracy,
        epochs=epochs,
        date=today(),
        machine=this_machine(),
    )


def tables(rows: list[Row]) -> str:
    """One for each machine and what was asked of it: only such rows may be compared."""
    parts = []
    for machine, accuracy, epochs in dict.fromkeys((row.machine, row.accuracy, row.epochs) for row in rows):
        of = [row for row in rows if (row.machine, row.accuracy, row.epochs) == (machine, accuracy, epochs)]
        dates = sorted(row.date for row in of)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        parts.append(f"{machine}, {when}, {epochs} epochs, accuracy {accuracy:g}:\n\n{_table(of)}")
    return "\n\n".join(parts)


def _table(rows: list[Row]) -> str:
    lines = [
        "| model | hosts | links, Mbit/s | way | plan | runs | samples/s | of DDP | to accuracy | best accuracy |",
        f"|{'---|' * 10}",
    ]
    for model, hosts, mbit in dict.fromkeys((row.model, row.hosts, row.mbit) for row in rows):
        here = [row for row in rows if (row.model, row.hosts, row.mbit) == (model, hosts, mbit)]
        base = statistics.median([row.samples_per_s for row in here if row.way == "ddp"] or [math.nan])
        for way in sorted({row.way for row in here}, key=WAYS.index):
            of = [row for row in here if row.way == way]
            pace = [row.samples_per_s for row in of]
            best = [row.best_accuracy for row in of if not math.isnan(row.best_accuracy)]
            cells = [
                model, str(hosts), f"{mbit:g}", way, ", ".join(dict.fromkeys(row.plan for row in of)), str(len(of)),
                _ranged(pace, "{:.0f}"), f"{statistics.median(pace) / base:.2f}", _to_accuracy(of) if best else "-",
                _ranged(best, "{:.3f}") if best else "-",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _to_accuracy(runs: list[Row]) -> str:
    """Of all runs: those that did not come to it are the slowest, not left out."""
    times = [math.inf if math.isnan(row.to_accuracy_s) else row.to_accuracy_s for row in runs]
    return f"{_ranged(times, '{:.0f} s')}, {sum(map(math.isfinite, times))} of {len(times)} reached it"


def _ranged(values: list[float], form: str) -> str:
    """The median, and of several the range."""
    middle, least, most = (
        form.format(value) if math.isfinite(value) else "never"
        for value in (statistics.median(values), min(values), max(values))
    )
    return middle if len(values) == 1 else f"{middle} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=tuple(REAL), choices=tuple(REAL))
    parser.add_argument("--hosts", nargs="*", type=int, default=(2, 4))
    parser.add_argument("--mbit", nargs="*", type=float, default=(100.0,))
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--accuracy", type=float, default=0.97)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "real.csv")
    parser.add_argument("--again", action="store_true", help="measure what this machine has measured before")
    parser.add_argument("--tables", nargs="+", type=Path, metavar="CSV", help="print what these have, measure nothing")
    options = parser.parse_args()
    if options.tables:
        print(tables([row for path in options.tables for row in read(Row, path)]))
        return
    if options.epochs < 2:
        parser.error(f"--epochs {options.epochs}: the first is not timed; give 2 or more")
    torch.set_num_threads(1)  # as the ranks: plans are made from what this process measures
    here, failures = this_machine(), Failures()
    done = set() if options.again else {row.key for row in read(Row, options.out)}
    for count in options.hosts:
        with Hosts(count) as hosts:
            for model in options.models:
                for mbit in options.mbit:
                    hosts.set_rate(mbit * 1e6)
                    plans: dict[str, Any] = {}
                    for repeat in range(options.repeats):
                        for way in WAYS:
                            if (here, model, count, mbit, way, repeat, options.accuracy, options.epochs) in done:
                                continue
                            with failures.noted(f"{model} {count} hosts {mbit:g} Mbit/s {way}, repeat {repeat}"):
                                if way != "ddp" and way not in plans:
                                    plans[way] = planned(model, way, count, mbit)
                                row = trained(
                                    hosts, model, mbit, way, plan=plans.get(way), epochs=options.epochs,
                                    accuracy=options.accuracy, repeat=repeat,
                                )  # fmt: skip
                                put(options.out, row)
                                print(row, flush=True)
    asked = here, options.accuracy, options.epochs
    found = [row for row in read(Row, options.out) if (row.machine, row.accuracy, row.epochs) == asked]
    print(f"\n{tables(found)}")
    failures.end()


if __name__ == "__main__":
    main()
