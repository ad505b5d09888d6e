"""What a link probe saw, and the cluster it amounts to. probe -> *link report* -> cluster.json -> partition, simulate.

Messages of growing size are timed between two ranks, and a line is laid through them:

    seconds                                 /
       |                              /           t = latency + bytes / bandwidth
       |                        /                 bandwidth: the slope among the large messages
       |______·______·    ·                       latency: what the smallest took beyond its bytes
       +------------------------------- bytes
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from pl_pipe.cluster import Cluster, Level
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

LARGE_RANGE = 64
"""Messages count as large down to this fraction of the largest one: 1 MiB where 64 MiB was sent."""
SANE_FACTORS = (0.5, 64.0)
"""An ideal ring has an all-reduce factor of 2, a switch that adds up has 1, and many ranks on few cores have tens."""

_log = get_logger(__name__)


@dataclass(frozen=True)
class Timing:
    """How long messages (one way) or all-reduces of one size took."""

    size_bytes: int
    median_s: float
    first_quartile_s: float
    third_quartile_s: float
    repeats: int


@dataclass(frozen=True)
class LinkFit:
    """The line through a link's timings. Spreads are first and third quartiles of the repeats."""

    bandwidth: float
    """Bytes a second, each way."""
    latency_s: float
    bandwidth_spread: tuple[float, float]
    latency_spread_s: tuple[float, float]


@dataclass(frozen=True)
class PairTimings:
    """Messages between two ranks, smallest first. A slow link's largest sizes are left out to keep the probe short."""

    ranks: tuple[int, int]
    timings: tuple[Timing, ...]

    @property
    def fit(self) -> LinkFit:
        return fit_link(self.timings)


@dataclass(frozen=True)
class AllReduceTimings:
    """All-reduces over `ranks`, smallest first; each counts until the last rank was done."""

    ranks: tuple[int, ...]
    timings: tuple[Timing, ...]

    def factor(self, bandwidth: float) -> float:
        """`Level.all_reduce_factor` on links of that bandwidth, from what each further byte costs."""
        members = len(self.ranks)
        return bandwidth / fit_link(self.timings).bandwidth * members / (members - 1)


@dataclass(frozen=True)
class LinkReport:
    """Everything one probe measured; the same on every rank."""

    hosts: tuple[str, ...]
    """By rank. Network namespaces are hosts of their own, as rehearsed clusters have them."""
    backend: str
    device: str
    torch_version: str
    pairs: tuple[PairTimings, ...]
    all_reduces: tuple[AllReduceTimings, ...]
    """Over all ranks; and within each host, where there are several hosts of several ranks."""
    remark: str = ""
    """Why this is not what the user asked for, where it is not."""

    @property
    def host_ranks(self) -> dict[str, list[int]]:
        """The ranks of each host, in order of appearance."""
        grouped: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            grouped.setdefault(host, []).append(rank)
        return grouped


def fit_link(timings: Sequence[Timing]) -> LinkFit:
    """Bandwidth and latency of a link.

    The bandwidth is the median slope between any two large sizes, weighted by their distance: the largest messages
    count most, and one disturbed size among the others does not decide. The latency is what the smallest message took
    beyond its own bytes; these may pass faster than the bandwidth says (a rate limiter lets a first burst through),
    which the slope between the two smallest sizes shows.
    """
    large = _large(timings)
    largest, smallest = large[-1], timings[0]
    slopes = [(slope, b.size_bytes - a.size_bytes) for a, b in combinations(large, 2) if (slope := _slope(a, b)) > 0]
    seconds_per_byte = _weighted_median(slopes) if slopes else largest.median_s / largest.size_bytes
    bandwidth = 1 / seconds_per_byte

    small_slope = min([seconds_per_byte, *(_slope(smallest, after) for after in timings[1:2])])
    own_bytes_s = smallest.size_bytes * max(small_slope, 0.0)
    ends = (smallest.first_quartile_s, smallest.median_s, smallest.third_quartile_s)
    low, latency, high = (max(seconds - own_bytes_s, 0.0) for seconds in ends)
    return LinkFit(
        bandwidth=bandwidth,
        latency_s=latency,
        bandwidth_spread=(
            bandwidth * largest.median_s / largest.third_quartile_s,
            bandwidth * largest.median_s / largest.first_quartile_s,
        ),
        latency_spread_s=(low, high),
    )


def cluster_of(report: LinkReport) -> Cluster:
    """The levels of the machines that were probed: inside a host, and between hosts."""
    hosts = _even_hosts(report)
    several = len(hosts) > 1 and len(hosts[0]) > 1
    members = (len(hosts[0]), len(hosts)) if several else (len(report.hosts),)
    shape = Cluster(tuple(Level(count, bandwidth=1.0) for count in members))
    return Cluster(tuple(_level(report, shape, number) for number in range(len(members))))


def write_cluster(report: LinkReport, cluster: Cluster, path: Path) -> None:
    """Writes `cluster.json`: the cluster, and below it what was measured. A reader never sees half of the file."""
    content = {**cluster.as_json(), **_facts(report, cluster)}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; choose another file for the cluster") from error
    finally:
        part.unlink(missing_ok=True)


def _facts(report: LinkReport, cluster: Cluster) -> dict[str, Any]:
    pairs = []
    for pair in report.pairs:
        fit = pair.fit
        pairs.append(
            {
                "ranks": list(pair.ranks),
                "level": cluster.meeting_level(pair.ranks),
                "seconds": _seconds(pair.timings),
                "bandwidth": fit.bandwidth,
                "latency_s": fit.latency_s,
                "spread": {"bandwidth": list(fit.bandwidth_spread), "latency_s": list(fit.latency_spread_s)},
            }
        )
    all_reduces = []
    for reduced in report.all_reduces:
        all_reduces.append(
            {
                "ranks": list(reduced.ranks),
                "level": cluster.meeting_level(reduced.ranks),
                "seconds": _seconds(reduced.timings),
                "factor": reduced.factor(cluster.link(*reduced.ranks).bandwidth),
            }
        )
    return {
        "pairs": pairs,
        "all_reduce": all_reduces,
        "backend": report.backend,
        "device": report.device,
        "hosts": list(report.hosts),
        "torch_version": report.torch_version,
        "remark": report.remark,
    }


def _seconds(timings: Sequence[Timing]) -> dict[str, float]:
    return {str(timing.size_bytes): timing.median_s for timing in timings}


def _large(timings: Sequence[Timing]) -> list[Timing]:
    """The sizes that tell the bandwidth: within reach of the largest, and not mostly latency. At least two."""
    least_bytes, least_s = timings[-1].size_bytes / LARGE_RANGE, 2 * timings[0].median_s
    large = [timing for timing in timings if timing.size_bytes >= least_bytes and timing.median_s >= least_s]
    return large if len(large) > 1 else list(timings[-2:])


def _slope(a: Timing, b: Timing) -> float:
    """Seconds a byte, from the smaller size to the larger."""
    return (b.median_s - a.median_s) / (b.size_bytes - a.size_bytes)


def _weighted_median(weighted: Sequence[tuple[float, int]]) -> float:
    """The first value, in order, with which half of the weight is reached."""
    half, reached = sum(weight for _, weight in weighted) / 2, 0
    for value, weight in sorted(weighted):
        reached += weight
        if reached >= half:
            return value
    raise AssertionError("no values")


def _even_hosts(report: LinkReport) -> list[list[int]]:
    """The ranks of each host, which a cluster's levels need to be neighbours, and as many on every host."""
    grouped = report.host_ranks
    for host, ranks in grouped.items():
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise ConfigError(
                f"host {host} has ranks {ranks}, which are not neighbours; number the ranks host by host "
                f"(torchrun does; with SLURM ask for --distribution=block)"
            )
    if len({len(ranks) for ranks in grouped.values()}) > 1:
        counts = ", ".join(f"{host}: {count}" for host, count in Counter(report.hosts).items())
        raise ConfigError(
            f"the hosts have different numbers of ranks ({counts}); start as many on each "
            f"(torchrun --nproc-per-node, srun --ntasks-per-node)"
        )
    return list(grouped.values())


def _level(report: LinkReport, shape: Cluster, number: int) -> Level:
    """Level `number` of `shape`: the median over the pairs that meet there."""
    fits = [pair.fit for pair in report.pairs if shape.meeting_level(pair.ranks) == number]
    reduced = [entry for entry in report.all_reduces if shape.meeting_level(entry.ranks) == number]
    if not fits or not reduced:
        raise ConfigError(
            f"a probe of {shape.workers} ranks measured {len(fits)} pair(s) and {len(reduced)} all-reduce(s) at level "
            f"{number}, which needs one of each; probe again"
        )
    bandwidth, latency_s = median(fit.bandwidth for fit in fits), median(fit.latency_s for fit in fits)
    factor = median(entry.factor(bandwidth) for entry in reduced)
    return Level(shape.levels[number].members, bandwidth, latency_s, _sane(factor, number))


def _sane(factor: float, number: int) -> float:
    least, most = SANE_FACTORS
    if least <= factor <= most:
        return factor
    kept = min(max(factor, least), most)
    _log.warning(
        "the all-reduce at level %d measured a factor of %.3g, where an ideal ring has 2; %g is taken instead. "
        "Other work on the machines disturbs such a measurement: probe again when they are idle.",
        number,
        factor,
        kept,
    )
    return kept
