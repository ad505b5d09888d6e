"""Pipelines against data parallelism on published profiles, over rehearsed links: predicted, simulated and measured.

    sudo -E .venv/bin/python benchmarks/pipedream/speedup.py            # --models vgg16 --gbits 10 3

Compute is recorded: layers sleep for the times of a published V100 profile (docs/recorded.md). All else is real: four
hosts with a link each (docs/lab.md), Lightning's loop, gloo's messages and all-reduces. All is slowed down alike, so
that the links take `--link` bits a second here, or less for small models; times below are on the record's clock.

| way | |
|---|---|
| ddp | Lightning's DDP, which overlaps its all-reduce with the backward; a step is as many mini-batches as workers |
| auto | `strategy=pipedream`, `plan=auto` |
| straight | the same with one worker a stage |
| uniform | as many layers on every worker, one worker a stage |
| 1f1b, gpipe | the straight plan, flushed after every mini-batch, which has as many micro-batches as stages |
| torch 1f1b, torch gpipe | the same by `torch.distributed.pipelining`, where each stage passes one tensor to the next |

`predicted` is the planner's price of the plan, `simulated` what the simulator says for its schedule. `overlap` is from
the run's timeline: how much of the time in which messages were under way the ranks computed. Rows are added to
`--out` as they come, in the place of another machine's; a run that was stopped goes on where it stood, and `--again`
measures all anew. `--simulate-again` predicts and simulates the rows
of `--out` anew and measures nothing: for a planner or a simulator that has changed. Rows whose plan would now be
another keep their numbers, and are named: they have to be measured again.
"""

import argparse
import itertools
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hosts import Hosts
from rows import PAYLOAD, read, this_machine, today, write

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerGraph, read_graph
from pl_pipe.partition import Plan, partition, split_by_hand, split_evenly, write_plan
from pl_pipe.report.measured_run import MeasuredRun, read_run
from pl_pipe.report.overlap import overlap
from pl_pipe.schedule import FLUSHING
from pl_pipe.strategies.pipeline.plan_comparison import quickest, simulated_step_s

BATCH_SIZES = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt": 32}
LEAST_DILATIONS = {"vgg16": 4.0, "alexnet": 10.0, "resnet50": 10.0, "gnmt": 10.0}
"""However slow the rehearsed links: this machine's own work, some 50 ms a mini-batch, must be little beside a step."""
GBITS = (25.0, 10.0, 3.0, 1.0)
WAYS = ("ddp", "auto", "straight", "uniform", "1f1b", "gpipe", "torch 1f1b", "torch gpipe")
TIMEOUT_S = 1800.0


@dataclass
class Row:
    """One way to train one model over one kind of link; times of a mini-batch in seconds."""

    model: str
    workers: int
    gbit: float
    way: str
    plan: str
    dilation: float
    predicted_s: float
    simulated_s: float
    measured_s: float
    spread_s: float
    """Between the quickest and the slowest update, of a mini-batch."""
    cores: float
    """Processor time of all ranks by wall time."""
    date: str = ""
    machine: str = ""
    """Where it was measured; the first rows do not say."""
    overlap: float = -1.0
    """Of the time in which a rank had messages under way, the share in which it computed; below 0: not recorded."""
    overlap_simulated: float = -1.0
    """The same in the simulator: what the model and the links allow."""

    @property
    def setting(self) -> tuple[Any, ...]:
        return self.model, self.workers, self.gbit, self.way


def planned(graph: LayerGraph, way: str, cluster: Cluster) -> Plan:
    data_parallel = split_by_hand(graph, cluster=cluster, split_after=[], replicas=[cluster.workers])
    if way == "ddp":
        return data_parallel
    if way == "uniform":
        return split_evenly(graph, cluster=cluster)
    straight = partition(graph, cluster=cluster, straight=True)
    if way != "auto":
        return straight
    others = (lambda: data_parallel, lambda: straight, lambda: split_evenly(graph, cluster=cluster))
    return quickest(partition(graph, cluster=cluster), others, schedule="pipedream")


def schedule_of(way: str) -> str:
    kind = way.removeprefix("torch ")
    return kind if kind in FLUSHING else "pipedream"


def simulated_again(row: Row, profiles: Path) -> Row | None:
    """The row with today's prediction and simulation; None where today's plan is not the one that was measured.

    A row knows its plan by shape and price: one of the same shape and another price may be cut elsewhere.
    """
    graph = read_graph(profiles / f"{row.model}.graph.txt")
    plan = planned(graph, row.way, Cluster.flat(row.workers, PAYLOAD * row.gbit * 1e9 / 8))
    if plan.shape != row.plan or not math.isclose(plan.predicted_step_s, row.predicted_s, rel_tol=1e-6):
        return None
    return replace(row, predicted_s=plan.predicted_step_s, simulated_s=simulated_step_s(plan, schedule_of(row.way)))


def measured(
    hosts: Hosts, profile: Path, model: str, gbit: float, way: str, *, link: float, updates: int
) -> Row | None:
    """One run, from the time when the pipeline is full until it drains."""
    graph, dilation = read_graph(profile), max(gbit * 1e9 / link, LEAST_DILATIONS[model])
    hosts.set_rate(gbit * 1e9 / dilation)
    cluster = Cluster.flat(len(hosts), PAYLOAD * gbit * 1e9 / 8)
    plan, kind, schedule = planned(graph, way, cluster), way.removeprefix("torch "), schedule_of(way)
    if kind != way and not _is_chain(plan):
        return None
    at_once = plan.round if schedule == "pipedream" else 1
    skipped = 2 if way == "ddp" or schedule in FLUSHING else -(-2 * plan.ranks // at_once)
    count = at_once * (skipped + updates + (0 if way == "ddp" or schedule in FLUSHING else -(-plan.ranks // at_once)))
    recorded = kind == way != "ddp" and len(plan.stages) > 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        write_plan(plan, file)
        more = {"timeline": folder} if recorded else {}
        ranks = hosts.run(
            "rehearsed" if kind == way else "torch_pipeline", timeout_s=TIMEOUT_S, profile=str(profile),
            dilation=dilation, batches=count, batch_size=BATCH_SIZES[model], schedule=schedule,
            plan=None if way == "ddp" else str(file),
            num_microbatches=len(plan.stages) if schedule in FLUSHING else None, **more,
        )  # fmt: skip
        overlaps = overlaps_of(read_run(Path(folder) / "timeline.json")) if recorded else {}
    per_update = 1 if way == "ddp" else at_once  # of the loop's batches
    marks = [per_update * (skipped + number) - 1 for number in range(updates + 1)]
    ends_s = [ranks[0]["ends_s"][mark] for mark in marks]
    each_s = [(after - start) / at_once / dilation for start, after in itertools.pairwise(ends_s)]
    computed_s = sum(rank["computed_s"][marks[-1]] - rank["computed_s"][marks[0]] for rank in ranks)
    return Row(
        model=model,
        workers=len(hosts),
        gbit=gbit,
        way=way,
        plan=plan.shape,
        dilation=dilation,
        predicted_s=plan.predicted_step_s,
        simulated_s=simulated_step_s(plan, schedule),
        measured_s=(ends_s[-1] - ends_s[0]) / updates / at_once / dilation,
        spread_s=max(each_s) - min(each_s),
        cores=computed_s / (ends_s[-1] - ends_s[0]),
        date=today(),
        machine=this_machine(),
        **overlaps,
    )


def overlaps_of(run: MeasuredRun) -> dict[str, float]:
    """How much of its messages' time the pipeline computed through, and how much it does in the simulator."""
    found = {"overlap": overlap(run), "overlap_simulated": overlap(replace(run, events=run.predicted))}
    return {name: messages.share for name, messages in found.items() if messages is not None}


def _is_chain(plan: Plan) -> bool:
    """Whether each stage passes one tensor on to the next, and to no other."""
    ways = sorted((transfer.source, transfer.target) for transfer in plan.transfers)
    return ways == [(stage, stage + 1) for stage in range(len(plan.stages) - 1)]


def simulate_again(out: Path, profiles: Path) -> None:
    """Brings what is predicted and simulated in `out` up to date, and says which rows it had to leave."""
    rows: list[Row] = []
    changed = 0
    for row in read(Row, out):
        again = simulated_again(row, profiles)
        name = f"{row.model} {row.workers} workers {row.gbit:g} Gbit/s {row.way}"
        if again is None:
            print(f"{name}: the plan measured, {row.plan}, is not today's; take its row out and measure it again")
        elif not math.isclose(again.simulated_s, row.simulated_s, rel_tol=1e-9):
            changed += 1
            print(
                f"{name} {row.plan}: {1e3 * row.simulated_s:.1f} ms simulated before, {1e3 * again.simulated_s:.1f} now"
            )
        rows.append(again or row)
    if not rows:
        raise SystemExit(f"{out} has no rows to simulate again; measure some first, or name another file with --out")
    write(out, rows)
    print(f"simulated again: {out}, {changed} of {len(rows)} rows changed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parent / "profiles")
    parser.add_argument("--models", nargs="*", default=tuple(BATCH_SIZES), choices=tuple(BATCH_SIZES))
    parser.add_argument("--gbits", nargs="*", type=float, default=GBITS)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--link", type=float, default=1e9, help="bits a second that links really have, at most")
    parser.add_argument("--updates", type=int, default=4, help="that are measured in each run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "speedup.csv")
    parser.add_argument("--again", action="store_true", help="measure what this machine has measured before")
    parser.add_argument("--simulate-again", action="store_true", help="predict and simulate the rows of --out anew")
    options = parser.parse_args()
    if options.simulate_again:
        simulate_again(options.out, options.profiles)
        return
    here = this_machine()
    done = set() if options.again else {row.setting for row in read(Row, options.out) if row.machine == here}
    with Hosts(options.workers) as hosts:
        for model in options.models:
            profile = (options.profiles / f"{model}.graph.txt").resolve()
            for gbit in options.gbits:
                for way in options.ways:
                    if (model, options.workers, gbit, way) in done:
                        continue
                    row = measured(hosts, profile, model, gbit, way, link=options.link, updates=options.updates)
                    if row is None:
                        continue
                    others = [known for known in read(Row, options.out) if known.setting != row.setting]
                    write(options.out, [*others, row])
                    print(
                        f"{model} {gbit:g} Gbit/s {way} {row.plan}: {1e3 * row.measured_s:.1f} ms measured, "
                        f"{1e3 * row.simulated_s:.1f} simulated, {1e3 * row.predicted_s:.1f} predicted; "
                        f"{row.cores:.2f} cores",
                        flush=True,
                    )
    print(f"measured: {options.out}; tables and pictures: python benchmarks/pipedream/report.py")


if __name__ == "__main__":
    main()
