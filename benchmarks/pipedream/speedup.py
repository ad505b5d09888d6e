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
the run's timeline: how much of the time in which messages were under way the ranks computed. All ways are measured over
at least `--minibatches`, 4 a worker unless given, in whole rounds and beginning with the full pipeline. `--repeats 3`
measures everything three times, one pass after another; report.py takes medians.

Rows are added to `--out` as they come; a run that was stopped goes on where it stood. A row with fewer mini-batches, or
of another machine, or slowed down less than `--dilation`, is not taken for done; of `--profiles` rows say nothing.
`--again` measures anew and replaces row by row. A run that fails is told and the others go on; then the program ends
with an error that names it. Copies may run side by side, if the machine has the
cores. `--simulate-again` predicts and simulates the rows of `--out` anew and measures nothing: for a planner or a
simulator that has changed. Rows whose plan would now be another keep their numbers, and are named: they have to be
measured again.
"""

import argparse
import itertools
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from failures import Failures
from hosts import Hosts
from rows import PAYLOAD, locked, put, read, this_machine, today, write

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
    """Of a mini-batch, between the quickest and the slowest stretch of the run; of older rows, update."""
    cores: float
    """Processor time of all ranks by wall time."""
    date: str = ""
    machine: str = ""
    """Where it was measured; the first rows do not say."""
    overlap: float = -1.0
    """Of the time in which a rank had messages under way, the share in which it computed; below 0: not recorded."""
    overlap_simulated: float = -1.0
    """The same in the simulator: what the model and the links allow."""
    repeat: int = 0
    minibatches: int = 0
    """That were measured. 0: an older row, of four updates, whatever those are of."""

    @property
    def key(self) -> tuple[Any, ...]:
        return self.machine, self.model, self.workers, self.gbit, self.way, self.repeat


@dataclass(frozen=True)
class Course:
    """What a run goes through, in updates of `at_once` mini-batches.

    It fills, then come `stretches` that are timed, each of the least whole rounds with a mini-batch for every rank: a
    pipeline's mini-batches end in bursts, so that single ones say little. Then it drains.
    """

    at_once: int
    filling: int
    stretch: int
    stretches: int
    draining: int

    @classmethod
    def of(cls, plan: Plan, way: str, *, minibatches: int) -> "Course":
        """With at least so many mini-batches timed."""
        schedule = schedule_of(way)
        at_once = plan.round if schedule == "pipedream" else 1
        stretch = -(-plan.ranks // at_once)
        stretches = -(-minibatches // (stretch * at_once))
        if way == "ddp" or schedule in FLUSHING:
            return cls(at_once, 2, stretch, stretches, 0)
        return cls(at_once, -(-2 * plan.ranks // at_once), stretch, stretches, stretch)

    @property
    def minibatches(self) -> int:
        """In all."""
        return self.at_once * (self.filling + self.stretch * self.stretches + self.draining)

    @property
    def timed(self) -> int:
        """Mini-batches."""
        return self.at_once * self.stretch * self.stretches

    def marks(self, per_update: int) -> list[int]:
        """After which batches of the loop, `per_update` an update, stretches begin and end."""
        return [per_update * (self.filling + self.stretch * number) - 1 for number in range(self.stretches + 1)]


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
    hosts: Hosts, profile: Path, model: str, gbit: float, way: str, *, dilation: float, minibatches: int, repeat: int
) -> Row | None:
    """One run, from the time when the pipeline is full until it drains."""
    graph = read_graph(profile)
    hosts.set_rate(gbit * 1e9 / dilation)
    cluster = Cluster.flat(len(hosts), PAYLOAD * gbit * 1e9 / 8)
    plan, kind, schedule = planned(graph, way, cluster), way.removeprefix("torch "), schedule_of(way)
    if kind != way and not _is_chain(plan):
        return None
    course = Course.of(plan, way, minibatches=minibatches)
    recorded = kind == way != "ddp" and len(plan.stages) > 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        write_plan(plan, file)
        more = {"timeline": folder} if recorded else {}
        ranks = hosts.run(
            "rehearsed" if kind == way else "torch_pipeline", timeout_s=TIMEOUT_S, waits=kind != way,
            profile=str(profile), dilation=dilation, batches=course.minibatches, batch_size=BATCH_SIZES[model],
            schedule=schedule, plan=None if way == "ddp" else str(file),
            num_microbatches=len(plan.stages) if schedule in FLUSHING else None, **more,
        )  # fmt: skip
        overlaps = overlaps_of(read_run(Path(folder) / "timeline.json")) if recorded else {}
    marks = course.marks(1 if way == "ddp" else course.at_once)
    ends_s = [ranks[0]["ends_s"][mark] for mark in marks]
    a_stretch = course.at_once * course.stretch * dilation
    each_s = [(after - start) / a_stretch for start, after in itertools.pairwise(ends_s)]
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
        measured_s=(ends_s[-1] - ends_s[0]) / course.timed / dilation,
        spread_s=max(each_s) - min(each_s),
        cores=computed_s / (ends_s[-1] - ends_s[0]),
        date=today(),
        machine=this_machine(),
        repeat=repeat,
        minibatches=course.timed,
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
    with locked(out):
        rows: list[Row] = []
        changed = 0
        for row in read(Row, out):
            again = simulated_again(row, profiles)
            name = f"{row.model} {row.workers} workers {row.gbit:g} Gbit/s {row.way}"
            if again is None:
                print(f"{name}: the plan measured, {row.plan}, is not today's; take its row out and measure it again")
            elif not math.isclose(again.simulated_s, row.simulated_s, rel_tol=1e-9):
                changed += 1
                before_ms, now_ms = 1e3 * row.simulated_s, 1e3 * again.simulated_s
                print(f"{name} {row.plan}: {before_ms:.1f} ms simulated before, {now_ms:.1f} now")
            rows.append(again or row)
        if not rows:
            raise SystemExit(f"{out} has no rows to simulate again; measure some first, or name another with --out")
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
    parser.add_argument("--dilation", type=float, help="at least, in the place of the one known to do for each model")
    parser.add_argument("--minibatches", type=int, help="that are timed in each run, at least; default: 4 a worker")
    parser.add_argument("--repeats", type=int, default=1, help="of each run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "speedup.csv")
    parser.add_argument("--again", action="store_true", help="measure what this machine has measured before")
    parser.add_argument("--simulate-again", action="store_true", help="predict and simulate the rows of --out anew")
    options = parser.parse_args()
    if options.simulate_again:
        simulate_again(options.out, options.profiles)
        return
    minibatches = 4 * options.workers if options.minibatches is None else options.minibatches
    if minibatches < 1:
        parser.error(f"--minibatches {minibatches}: give 1 or more")
    here, failures = this_machine(), Failures()
    known = [] if options.again else read(Row, options.out)
    done = {row.key for row in known if row.minibatches >= minibatches and row.dilation >= (options.dilation or 0.0)}
    with Hosts(options.workers) as hosts:
        for repeat, model, gbit, way in itertools.product(
            range(options.repeats), options.models, options.gbits, options.ways
        ):
            if (here, model, options.workers, gbit, way, repeat) in done:
                continue
            name = f"{model} {gbit:g} Gbit/s {way}, repeat {repeat}"
            with failures.noted(name):
                row = measured(
                    hosts, (options.profiles / f"{model}.graph.txt").resolve(), model, gbit, way,
                    dilation=max(gbit * 1e9 / options.link, options.dilation or LEAST_DILATIONS[model]),
                    minibatches=minibatches, repeat=repeat,
                )  # fmt: skip
                if row is None:
                    continue
                put(options.out, row)
                print(
                    f"{name}, {row.plan}: {1e3 * row.measured_s:.1f} ms measured, {1e3 * row.simulated_s:.1f} "
                    f"simulated, {1e3 * row.predicted_s:.1f} predicted; {row.cores:.2f} cores",
                    flush=True,
                )
    print(f"tables and pictures: python benchmarks/pipedream/report.py --measured {options.out}")
    failures.end()


if __name__ == "__main__":
    main()
