"""Workers and the links between them, by level. probe or settings -> *cluster* -> partition, simulate.

    level 1 (between hosts)      ┌──────── 1.25e9 bytes/s ────────┐
    level 0 (inside a host)   [0 1 2 3]                        [4 5 6 7]      levels = [[4, 1.25e10], [2, 1.25e9]]

A level joins `members` groups of the level below it (level 0 joins single workers). Its bandwidth is what one member
can send, and at the same time receive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pl_pipe.errors import ConfigError
from pl_pipe.json_file import check_schema, read_json

SCHEMA = 1
_REMEDY = "`pl-pipe probe` writes such a file"


@dataclass(frozen=True)
class Level:
    """One kind of link, and how many members it joins."""

    members: int
    bandwidth: float
    """Bytes a second, each way."""
    latency_s: float = 0.0
    all_reduce_factor: float = 2.0
    """An all-reduce of P bytes over r members takes `factor * (r - 1) / r * P / bandwidth`; 2 is an ideal ring."""

    def __post_init__(self) -> None:
        if not isinstance(self.members, int) or self.members < 1:
            raise ConfigError(f"a cluster level joins {self.members} members; give a whole number, 1 or more")
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ConfigError(f"a cluster level has bandwidth {self.bandwidth}; give bytes per second, more than 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(f"a cluster level has latency_s={self.latency_s}; give seconds, 0 or more")
        if not (math.isfinite(self.all_reduce_factor) and self.all_reduce_factor > 0):
            raise ConfigError(f"a cluster level has all_reduce_factor={self.all_reduce_factor}; 2 is an ideal ring")

    def all_reduce_s(self, size_bytes: float, members: int) -> float:
        """How long an all-reduce over `members` takes on idle links."""
        if members < 2:
            return 0.0
        share = (members - 1) / members
        return 2 * (members - 1) * self.latency_s + self.all_reduce_factor * share * size_bytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Workers numbered 0 … n-1; neighbours in number share the innermost link."""

    levels: tuple[Level, ...]
    """Innermost first."""

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError("a cluster has no levels; give at least one, such as [[4, 1.25e9]]")

    @classmethod
    def flat(cls, workers: int, bandwidth: float, *, latency_s: float = 0.0) -> "Cluster":
        """Workers that all see each other alike."""
        return cls((Level(workers, bandwidth, latency_s),))

    @classmethod
    def of_levels(cls, members: Sequence[int], bandwidths: Sequence[float]) -> "Cluster":
        """Levels from two lists of one length, innermost first."""
        if len(members) != len(bandwidths):
            raise ConfigError(
                f"{len(members)} levels of workers ({list(members)}), but {len(bandwidths)} bandwidths "
                f"({list(bandwidths)}); give one bandwidth for each level"
            )
        return cls(tuple(Level(int(count), float(speed)) for count, speed in zip(members, bandwidths, strict=True)))

    @property
    def workers(self) -> int:
        return math.prod(level.members for level in self.levels)

    def group_size(self, level: int) -> int:
        """Workers inside one group of `level`."""
        return math.prod(entry.members for entry in self.levels[: level + 1])

    def meeting_level(self, ranks: Sequence[int]) -> int:
        """The innermost level that joins all of `ranks`."""
        for level in range(len(self.levels)):
            size = self.group_size(level)
            if len({rank // size for rank in ranks}) == 1:
                return level
        raise ConfigError(f"ranks {list(ranks)} are not all in a cluster of {self.workers} workers")

    def link(self, *ranks: int) -> Level:
        """The link that `ranks` speak over."""
        return self.levels[self.meeting_level(ranks)]

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "levels": [
                {
                    "members": level.members,
                    "bandwidth": level.bandwidth,
                    "latency_s": level.latency_s,
                    "all_reduce_factor": level.all_reduce_factor,
                }
                for level in self.levels
            ],
        }

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> "Cluster":
        """The cluster in a `cluster.json` (or in a plan); other keys of the file are for readers."""
        check_schema(content, SCHEMA, source=source, what="cluster file", error=ConfigError, remedy=_REMEDY)
        try:
            return cls(tuple(Level(**entry) for entry in content["levels"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{source} has a level that cannot be read: {error!r}; {_REMEDY}") from error


def read_cluster(path: Path) -> Cluster:
    """The cluster that `pl-pipe probe` measured."""
    content = read_json(path, name=f"cluster.path={path}", error=ConfigError, remedy=_REMEDY)
    return Cluster.from_json(content, source=str(path))
