"""How close plans with replicated stages come to their bound, the slowest stage over its replicas: sleeping layers.

    python benchmarks/pipeline/replication.py           # --quick: two plans, one repeat

A stage with r replicas sleeps r times as long as one that has a single rank (40 ms forward and 80 ms backward,
`--forward-ms`, `--backward-ms`), so that every stage of a plan is as slow as the others and the bound is the same for
all. `step` is the time a batch takes when the pipeline is full: the mean over whole rounds in the middle of a run, as
rank 0 sees it. It is divided by the bound, the sleeps timed in the same run. Medians over the repeats, then the least
and the most. The rows alternate.

The peer of plan 4, which is data parallelism, is torch's DistributedDataParallel on four ranks, the same layers and
batches, without Lightning.

Goal: at most 1.10 for 3-1 and 2-2.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from efficiency import BATCH, WIDTH, Sleeper, Work, batch_ends, stage_s
from ranks import busy, prepare, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pl_pipe.strategies import PipeDreamStrategy

SCHEDULES = {"round": {}, "minibatch": {"update": "minibatch"}}


@dataclass(frozen=True)
class Plan:
    replicas: tuple[int, ...]
    forward_s: float
    backward_s: float
    batches: int

    @property
    def name(self) -> str:
        return "-".join(map(str, self.replicas))

    @property
    def middle(self) -> tuple[int, int]:
        """The first and the last batch that are looked at, whole rounds apart."""
        a_round = lcm(*self.replicas)
        first = -(-3 * sum(self.replicas) // a_round) * a_round
        return first - 1, first - 1 + (self.batches - first - 2) // a_round * a_round

    def layers(self) -> list[Sleeper]:
        return [Sleeper(Work(1, r * self.forward_s, r * self.backward_s, 0)) for r in self.replicas]


def ours(plan: Plan, settings: dict[str, Any]) -> list[float]:
    """When each batch ended, on this rank."""
    torch.manual_seed(0)
    ends = [f"layers.{index}" for index in range(len(plan.replicas) - 1)]
    pipeline = PipeDreamStrategy(split_points=ends, replicas=plan.replicas, timeout_s=60, **settings)
    return batch_ends(plan.layers(), plan.batches, devices=sum(plan.replicas), strategy=pipeline)


def data_parallel(plan: Plan) -> list[float]:
    """The same for torch: a step of its four ranks is four batches."""
    (ranks,) = plan.replicas
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=ranks)
    torch.manual_seed(0)
    module = DistributedDataParallel(nn.Sequential(*plan.layers()))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    times: list[float] = []
    for _ in range(plan.batches // ranks):
        module(torch.randn(BATCH, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times += [time.perf_counter()] * ranks
    dist.destroy_process_group()
    return times


@dataclass
class Row:
    """One side, over the repeats."""

    plan: Plan
    name: str
    run: Callable[[], list[float]]
    steps_s: list[float] = field(default_factory=list)

    def measure(self) -> None:
        times, (first, last) = self.run(), self.plan.middle
        self.steps_s.append((times[last] - times[first]) / (last - first))

    def shown(self, bound_s: float) -> str:
        ratios = sorted(step / bound_s for step in self.steps_s)
        middle = statistics.median(ratios)
        step = f"{statistics.median(self.steps_s) * 1e3:.1f} ms"
        return f"| {self.plan.name} | {self.name} | {step} | {middle:.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |"


def rows_of(plan: Plan) -> list[Row]:
    ranks = sum(plan.replicas)

    def row(name: str, settings: dict[str, Any]) -> Row:
        return Row(plan, name, lambda: run_ranks(ours, ranks, plan, settings)[0])

    rows = [row(f"pipedream, update={update}", settings) for update, settings in SCHEDULES.items()]
    if len(plan.replicas) == 1:
        rows.append(Row(plan, "torch DistributedDataParallel", lambda: run_ranks(data_parallel, ranks, plan)[0]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="*", default=("3-1", "2-2", "2-1-1", "1-2-1", "4"))
    parser.add_argument("--forward-ms", type=float, default=40.0)
    parser.add_argument("--backward-ms", type=float, default=80.0)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepare()
    names, repeats = (("3-1", "2-2"), 1) if arguments.quick else (arguments.plans, arguments.repeats)
    batches = 36 if arguments.quick else arguments.batches
    forward_s, backward_s = arguments.forward_ms / 1e3, arguments.backward_ms / 1e3
    print(f"{busy()}; {repeats} repeats of {batches} batches\n")
    print("| plan | | step | / bound | spread |\n|---|---|---|---|---|")
    for name in names:
        plan = Plan(tuple(map(int, name.split("-"))), forward_s, backward_s, batches)
        rows, bounds = rows_of(plan), []
        for _ in range(repeats):
            bounds.append(stage_s(Work(1, forward_s, backward_s, batches)))
            for row in rows:
                row.measure()
        for row in rows:
            print(row.shown(statistics.median(bounds)), flush=True)
    print(f"\nafterwards {busy()}")


if __name__ == "__main__":
    main()
