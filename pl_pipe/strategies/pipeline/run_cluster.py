"""The links that a run's plan counts on: assumed, measured between its ranks, or read. ranks -> *cluster* -> plan."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from pl_pipe.cluster import Cluster, Level, read_cluster
from pl_pipe.cluster.planned import DEFAULT_BANDWIDTH
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.profiling.link_probe import measure_links
from pl_pipe.profiling.link_report import cluster_of
from pl_pipe.units import format_bytes, format_seconds

LOCAL, PROBE = "local", "probe"
LOCAL_BANDWIDTH = {"gloo": 3e9, "nccl": 1.25e10}
"""Bytes a second between two ranks of one machine: what gloo was measured to give (docs/planning.md), and what PCIe
gives two GPUs at least."""
LOCAL_ALL_REDUCE_FACTOR = {"gloo": 3.0, "nccl": 12.5}
"""What gloo was measured to take on enough cores; it adds up gradients also where NCCL carries messages, four times as
fast."""
PAIR_BUDGET_S = 0.3
"""Of a probe at setup, for which the whole run waits: four ranks take some three seconds."""

_log = get_logger(__name__)


def assumed_cluster(devices: int, *, backend: str = "gloo", nodes: int = 1) -> Cluster:
    """Ranks of machines that nobody has measured, by what carries their messages; between several machines 10 Gbit/s
    are taken."""
    inside = Level(devices // nodes, LOCAL_BANDWIDTH[backend], all_reduce_factor=LOCAL_ALL_REDUCE_FACTOR[backend])
    if nodes == 1:
        return Cluster((inside,))
    _log.warning(
        "the network between %d nodes was not measured: the plan takes %s/s for it, and %s/s inside a node; set "
        "cluster=probe to measure both",
        nodes, format_bytes(DEFAULT_BANDWIDTH), format_bytes(inside.bandwidth),
    )  # fmt: skip
    between = Level(nodes, DEFAULT_BANDWIDTH)
    return Cluster((between,) if inside.members == 1 else (inside, between))


def read_for(path: Path, devices: int) -> Cluster:
    """The cluster in the file, if it is as large as the run."""
    return fitting(read_cluster(path), devices, source=f"cluster={path}")


def fitting(cluster: Cluster, devices: int, *, source: str) -> Cluster:
    """The cluster, if it is as large as the run."""
    if cluster.workers != devices:
        raise ConfigError(
            f"{source} describes {cluster.workers} workers, the trainer has {devices} devices; set "
            f"devices={cluster.workers}, or measure these with cluster=probe"
        )
    return cluster


def probed_cluster() -> Cluster:
    """The links between the ranks of the process group; all of them call it alike, and get the same answer.

    Messages are gloo's and on the host, as gradients are added up; what NCCL may carry more quickly is not measured.
    """
    report = measure_links(device="cpu", pair_budget_s=PAIR_BUDGET_S)
    found = cluster_of(report)
    if dist.get_rank() == 0:
        _log.info("the links between %d ranks were measured: %s", found.workers, _described(found))
    return found


def _described(cluster: Cluster) -> str:
    places = ("inside a host", "between hosts") if len(cluster.levels) > 1 else ("between any two",)
    return "; ".join(
        f"{place} {format_bytes(level.bandwidth)}/s, latency {format_seconds(level.latency_s)}, "
        f"all-reduce factor {level.all_reduce_factor:.3g}"
        for place, level in zip(places, cluster.levels, strict=True)
    )


def shortened(cluster: Cluster, workers: int) -> Cluster:
    """The first workers of a cluster with one level."""
    (level,) = cluster.levels
    return Cluster((replace(level, members=workers),))
