"""Sums of one bucket over every topology, beside the backend's own all_reduce: seconds, CSV and picture.

    python benchmarks/adapt/allreduce.py --ranks 4 --megabytes 25

Topologies take turns, so that what else the machine does befalls all alike; the median of all turns counts, and half of
them lie between the quartiles that are told.
"""

import argparse
import csv
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from series import quartiles

from pl_pipe.comm import DistributedSumming
from pl_pipe.comm.topology import NATIVE, SHAPES, DistributedMailbox, TopologySumming, topology_of
from pl_pipe.report.charts import figure, stage_colour


def main() -> None:
    options = _options()
    with mp.get_context("spawn").Manager() as manager:
        found: Any = manager.dict()
        mp.spawn(_rank, args=(options, found), nprocs=options.ranks)
        times_s = dict(found)
    native_s = statistics.median(times_s[NATIVE])
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, seconds in times_s.items():
        median_s = statistics.median(seconds)
        lower_s, _, upper_s = quartiles(seconds)
        rows.append((name, median_s, min(seconds), max(seconds), median_s / native_s, lower_s, upper_s))
        print(
            f"{name:24s} {1e3 * median_s:8.1f} ms ({1e3 * lower_s:.1f} to {1e3 * upper_s:.1f})  "
            f"{median_s / native_s:5.2f} × native"
        )
    with (folder / "allreduce.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ("topology", "median_s", "least_s", "most_s", "times_native", "lower_quartile_s", "upper_quartile_s")
        )
        writer.writerows(rows)
    with figure(folder / "allreduce.png", width=8, height=4) as drawn:
        axes = drawn.add_subplot()
        axes.barh([row[0] for row in rows], [1e3 * row[1] for row in rows], color=stage_colour(0))
        axes.invert_yaxis()
        axes.set_xlabel(f"ms for {options.megabytes} MB on {options.ranks} ranks")
        axes.axvline(1e3 * native_s, color="#444444", linewidth=0.8)


def _rank(rank: int, options: argparse.Namespace, found: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"file://{options.meeting}", rank=rank, world_size=options.ranks)
    ranks, hosts = list(range(options.ranks)), [f"host{rank}" for rank in range(options.ranks)]
    group = dist.new_group()
    summing = TopologySumming(
        topology_of(NATIVE, hosts),
        DistributedMailbox(group, ranks, timeout_s=60),
        native=DistributedSumming(dist.group.WORLD, ranks),
        piece_bytes=options.piece_kilobytes << 10,
    )
    bucket = torch.ones(int(options.megabytes * 1e6) // 4)
    times_s: dict[str, list[float]] = {name: [] for name in options.topologies}
    for turn in range(options.turns + 1):
        for name in options.topologies:
            summing.switch(topology_of(name, hosts))
            dist.barrier()
            begin_s = time.perf_counter()
            summing.start(bucket).wait()
            took_s = torch.tensor(time.perf_counter() - begin_s, dtype=torch.float64)
            dist.all_reduce(took_s, dist.ReduceOp.MAX)
            bucket.fill_(1.0)
            if turn:
                times_s[name].append(float(took_s))
    if rank == 0:
        found.update(times_s)
    summing.close()
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--piece-kilobytes", type=int, default=2048)
    parser.add_argument("--topologies", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--out", default="outputs/adapt")
    found = parser.parse_args()
    if NATIVE not in found.topologies:
        found.topologies.append(NATIVE)
    found.meeting = Path(os.environ.get("TMPDIR", "/tmp")) / f"pl-pipe-allreduce-{os.getpid()}"
    return found


if __name__ == "__main__":
    main()
