"""The cluster that a plan is to be made for, from its settings. settings -> *planned cluster* -> partition."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pl_pipe.cluster.network import ClusterConfig
from pl_pipe.cluster.rehearsed import RehearsedCluster
from pl_pipe.cluster.topology import Cluster, Level, read_cluster
from pl_pipe.errors import ConfigError

DEFAULT_BANDWIDTH = 1.25e9
"""10 Gbit/s: what a plan assumes of a network it is told nothing about."""


def is_described(config: ClusterConfig) -> bool:
    """Whether the settings say anything about workers and links."""
    described = (config.devices, config.bandwidth, config.levels, config.path, config.lab)
    return any(value is not None for value in described)


def planned_cluster(config: ClusterConfig) -> Cluster:
    """The workers and links that the settings describe, in one of four ways."""
    ways = {
        "cluster.devices": config.devices,
        "cluster.levels": config.levels,
        "cluster.path": config.path,
        "cluster.lab": config.lab,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) if given else "none"
        if not given and config.bandwidth is not None:
            said = "cluster.bandwidth without cluster.devices"
        raise ConfigError(
            f"a plan needs one description of the cluster, got {said}; set cluster.devices=4 (with "
            f"cluster.bandwidth=1.25e9), or cluster.levels=[[4,1.25e10],[2,1.25e9]], or cluster=file "
            f"cluster.path=cluster.json, or a lab such as cluster=lab_4x1_1gbit"
        )
    if config.devices is None and (config.bandwidth is not None or config.latency_s):
        raise ConfigError(f"cluster.bandwidth and cluster.latency_s go with cluster.devices, not with {given[0]}")
    if config.path is not None:
        return read_cluster(Path(config.path).expanduser())
    if config.lab is not None:
        return RehearsedCluster.of(config.lab).levels()
    if config.levels is not None:
        return _of_pairs(config.levels)
    assert config.devices is not None
    bandwidth = DEFAULT_BANDWIDTH if config.bandwidth is None else config.bandwidth
    return Cluster((Level(config.devices, bandwidth, config.latency_s),))


def _of_pairs(levels: Any) -> Cluster:
    wrong = ConfigError(
        f"cluster.levels={levels} is not a list of [workers, bytes per second] pairs, innermost first; "
        f"give for example cluster.levels=[[4,1.25e10],[2,1.25e9]]"
    )
    if not isinstance(levels, Sequence) or isinstance(levels, str) or not levels:
        raise wrong
    members, bandwidths = [], []
    for pair in levels:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise wrong
        count, speed = pair
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in pair)
        if not numbers or not math.isfinite(count) or count != int(count):
            raise wrong
        members.append(int(count))
        bandwidths.append(float(speed))
    return Cluster.of_levels(members, bandwidths)
