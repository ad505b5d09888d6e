"""A published profile with recorded compute: one device, data parallel and pipelines, beside the simulator's answers.

    python benchmarks/pipeline/recorded.py vgg16.graph.txt            # --dilation 20 --ranks 4 --batches 14

Layers sleep for the profile's times × dilation (docs/recorded.md); ranks, messages and all-reduces are real, on this
machine's loopback. Plans are made for links of `--bandwidth` on the record's clock.

`mini-batch` is the time from one to the next in the middle of a run, the median over the repeats. `simulated` is what
the simulator says for the same plan and the dilated profile on the links that `cluster=local` assumes. `cores` is the
processor time of all ranks by the wall time: what is not asleep. `memory` is the most that one rank had, `all` the sum
over the ranks.
"""

import argparse
import itertools
import json
import logging
import resource
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from ranks import busy, prepare, run_ranks

from pl_pipe.cluster import Cluster
from pl_pipe.graph import LayerGraph
from pl_pipe.partition import Plan, partition, split_by_hand
from pl_pipe.recipes.recorded.datamodule import RecordedData
from pl_pipe.recipes.recorded.module import RecordedModel
from pl_pipe.recipes.recorded.record import Record
from pl_pipe.schedule import build_programs
from pl_pipe.simulate import SimulationOptions, simulate, steady_batches
from pl_pipe.strategies import PipeDreamStrategy
from pl_pipe.strategies.run_cluster import assumed_cluster

TIMEOUT_S = 900.0
WAYS = ("single", "ddp", "straight", "auto")


@dataclass(frozen=True)
class Work:
    profile: str
    dilation: float
    batch_size: int
    batches: int
    cluster: str
    """The file that plans are made with."""


class Clock(L.Callback):
    """When batches ended, and what the process had computed by then."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.computed_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.perf_counter())
        self.computed_s.append(time.process_time())


def train(work: Work, way: str, ranks: int) -> dict[str, Any]:
    """One run's clock on this rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy: Any = {"single": "auto", "ddp": "ddp"}.get(way)
    if strategy is None:
        strategy = PipeDreamStrategy(plan=way, cluster=work.cluster, timeout_s=TIMEOUT_S)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=1, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = RecordedModel(work.profile, work.dilation, work.batch_size)
    batches = max(4, work.batches // 4) if way == "single" else work.batches
    trainer.fit(model, datamodule=RecordedData(batch_size=work.batch_size, batches=batches))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ends_s": clock.ends_s, "computed_s": clock.computed_s, "memory": memory}


@dataclass
class Row:
    way: str
    plan: Plan
    mini_batch_s: list[float] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    def measure(self, work: Work) -> None:
        ranks = 1 if self.way == "single" else self.plan.ranks
        found = run_ranks(train, ranks, work, self.way, ranks, timeout_s=TIMEOUT_S)
        steps = len(found[0]["ends_s"])
        at_once = ranks if self.way == "ddp" else 1
        first, last = (1, steps - 1) if at_once > 1 or ranks == 1 else self._middle(steps)
        span_s = found[0]["ends_s"][last] - found[0]["ends_s"][first]
        self.mini_batch_s.append(span_s / (last - first) / at_once)
        computed_s = sum(rank["computed_s"][last] - rank["computed_s"][first] for rank in found)
        self.cores.append(computed_s / span_s)
        self.memory.append(max(rank["memory"] for rank in found))
        self.together.append(sum(rank["memory"] for rank in found))

    def _middle(self, steps: int) -> tuple[int, int]:
        """Whole rounds between the filling of the pipeline and its draining."""
        first = len(self.plan.stages) + self.plan.round
        rounds = (steps - 2 - len(self.plan.stages) - first) // self.plan.round
        return first, first + max(rounds, 1) * self.plan.round

    def simulated_s(self) -> float:
        programs = build_programs(
            self.plan, schedule="pipedream", batches=steady_batches(self.plan, 0.0), update="round"
        )
        return simulate(self.plan, programs, options=SimulationOptions(record_events=False)).step_s

    def shown(self) -> str:
        measured, simulated = statistics.median(self.mini_batch_s), self.simulated_s()
        spread = f"{min(self.mini_batch_s):.2f} to {max(self.mini_batch_s):.2f}"
        return (
            f"| {self.way} | {self.plan.shape} | {measured:.2f} s | {spread} | {simulated:.2f} s | "
            f"{measured / simulated:.3f} | {statistics.median(self.cores):.2f} | "
            f"{max(self.memory) / 1e9:.1f} GB | {max(self.together) / 1e9:.1f} GB |"
        )


def planned(graph: LayerGraph, way: str, cluster: Cluster) -> Plan:
    """The plan of a way, on the links of this machine."""
    local = assumed_cluster(1 if way == "single" else cluster.workers, torch.device("cpu"))
    if way in ("single", "ddp"):
        return split_by_hand(graph, cluster=local, split_after=[], replicas=[local.workers])
    return replace(partition(graph, cluster=cluster, straight=way == "straight"), cluster=local)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--dilation", type=float, default=20.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    parser.add_argument("--bandwidth", type=float, default=1.25e9)
    options = parser.parse_args()
    prepare()
    profile = str(Path(options.profile).resolve())
    graph = Record.read(profile).dilated(options.dilation)
    cluster = Cluster.flat(options.ranks, options.bandwidth / options.dilation)
    file = Path(tempfile.mkdtemp()) / "cluster.json"
    file.write_text(json.dumps(cluster.as_json()))
    work = Work(profile, options.dilation, options.batch_size, options.batches, str(file))
    rows = [Row(way, planned(graph, way, cluster)) for way in options.ways]
    print(f"{busy()}; {options.repeats} repeats of {options.batches} mini-batches, dilation {options.dilation:g}\n")
    for _, row in itertools.product(range(options.repeats), rows):
        row.measure(work)
        print(f"{row.way}: {row.mini_batch_s[-1]:.2f} s, {busy()}", flush=True)
    print("\n| way | plan | mini-batch | spread | simulated | measured / simulated | cores | memory | all |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(row.shown(), flush=True)


if __name__ == "__main__":
    main()
