"""How long the simulator takes: a straight pipeline over many mini-batches, and plans for 4,096 workers.

    python benchmarks/simulator/run.py

Each line is the median of three runs with their spread, in processor time: programs built, proved right, and simulated,
events off.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pl_pipe.cluster import Cluster
from pl_pipe.partition import Plan, Stage, Transfer
from pl_pipe.schedule import build_programs, validate
from pl_pipe.simulate import SimulationOptions, simulate, steady_batches

Result = TypeVar("Result")
CASES: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("16 stages, 1,000 mini-batches", (1,) * 16, 1000),
    ("4096 (data parallel)", (4096,), None),
    ("4095-1", (4095, 1), None),
    ("2731-1365", (2731, 1365), None),
    ("256 replicas of 16 stages", (256,) * 16, None),
)


def plan_of(replicas: Sequence[int]) -> Plan:
    """Stages of 30 ms a mini-batch and replica, 10 MB between them and 50 MB of weights each, on 10 Gbit/s."""
    first = 0
    stages = []
    for index, count in enumerate(replicas):
        ranks = tuple(range(first, first + count))
        stages.append(Stage((f"layer{index}",), (), ranks, 0.01, 0.02, 50_000_000, 100_000_000))
        first += count
    transfers = tuple(Transfer(index, index + 1, 10_000_000) for index in range(len(replicas) - 1))
    return Plan(tuple(stages), transfers, Cluster.flat(first, 1.25e9), "none", 1.0, 1.0, None, 1.0)


def timed(work: Callable[[], Result], into: list[float]) -> Result:
    start = time.process_time()
    result = work()
    into.append(time.process_time() - start)
    return result


def shown(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    options = SimulationOptions(record_events=False)
    print(f"{'plan':30} {'actions':>9}  {'build':>22}  {'validate':>22}  {'simulate':>22}  simulated step")
    for name, replicas, wanted in CASES:
        plan = plan_of(replicas)
        batches = wanted or steady_batches(plan)
        build: list[float] = []
        check: list[float] = []
        run: list[float] = []
        for _ in range(arguments.repeats):
            programs = timed(
                lambda: build_programs(plan, schedule="pipedream", batches=batches, update="minibatch"),  # noqa: B023
                build,
            )
            timed(lambda: validate(programs), check)  # noqa: B023
            found = timed(lambda: simulate(plan, programs, options=options), run)  # noqa: B023
        step = f"{found.step_s * 1e3:.4g} ms"
        print(f"{name:30} {programs.actions:9,}  {shown(build)}  {shown(check)}  {shown(run)}  {step}", flush=True)


if __name__ == "__main__":
    main()
