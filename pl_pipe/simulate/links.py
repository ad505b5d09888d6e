"""Ports of the cluster and the messages that queue on them. cluster -> *links* -> engine.

    rank 0 ─┐                              ┌─ rank 4
            ├─ host 0 ─out═══════in─ host 1 ─┤          a message takes the ports of the level where its ends meet:
    rank 1 ─┘                              └─ rank 5    out of the sender's side, then into the receiver's

Messages on one port share its bandwidth (`pl_pipe.simulate.sharing`). Incoming and outgoing ports are apart: bandwidth
holds each way. An all-reduce is a ring, of a message from each member to the next. These do not wait for each other:
what one link is late by, members make up for with the other buckets that they have under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pl_pipe.partition import Plan
from pl_pipe.simulate.options import SimulationOptions


@dataclass(frozen=True, slots=True)
class Route:
    """What one message from a rank to another takes."""

    ports: tuple[int, int]
    """Out of the sender's side, into the receiver's."""
    wire_s: float
    """How long it takes the two, if nothing else is on them."""
    latency_s: float
    size_bytes: int
    level: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one all-reduce among ranks takes."""

    ring: tuple[tuple[int, int], ...]
    """The ports that each member's part passes: out of its side, into the next one's."""
    wire_s: float
    """How long each part takes its ports, if nothing else is on them."""
    latency_s: float
    """Behind the last part."""
    size_bytes: int
    """What each member sends, as in a ring."""
    level: int


class Links:
    """Routes by pair of ranks, and the numbers of their ports."""

    def __init__(self, plan: Plan, options: SimulationOptions) -> None:
        self._cluster = plan.cluster
        self._options = options
        self._levels = [
            replace(level, bandwidth=level.bandwidth * options.contention.get(index, 1.0))
            for index, level in enumerate(plan.cluster.levels)
        ]
        self._parameter_bytes = [stage.parameter_bytes for stage in plan.stages]
        self._stage_of = {rank: index for index, stage in enumerate(plan.stages) for rank in stage.ranks}
        self._sizes: dict[tuple[int, int], int] = {}
        for transfer in plan.transfers:
            pair = transfer.source, transfer.target
            self._sizes[pair] = self._sizes.get(pair, 0) + transfer.size_bytes
        self._ports: dict[tuple[int, int], int] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._exchanges: dict[tuple[int, ...], Exchange] = {}

    def route(self, source: int, target: int) -> Route:
        """For an activation or, the other way, its gradient."""
        found = self._routes.get((source, target))
        if found is None:
            first, second = sorted((self._stage_of[source], self._stage_of[target]))
            size = round(self._sizes[first, second] / self._options.activation_compression_ratio)
            index = self._cluster.meeting_level((source, target))
            level = self._levels[index]
            found = Route(
                ports=(self._port(index, source), self._port(index, target) + 1),
                wire_s=size / level.bandwidth,
                latency_s=level.latency_s,
                size_bytes=size,
                level=index,
            )
            self._routes[source, target] = found
        return found

    def exchange(self, stage: int, members: tuple[int, ...]) -> Exchange:
        """For the gradients of a stage among some of its replicas."""
        found = self._exchanges.get(members)
        if found is None:
            size = self._parameter_bytes[stage]
            index = self._cluster.meeting_level(members)
            level = self._levels[index]
            latency_s = level.all_reduce_s(0, len(members))
            found = Exchange(
                ring=self._ring(index, members),
                wire_s=level.all_reduce_s(size, len(members)) - latency_s,
                latency_s=latency_s,
                size_bytes=round(2 * (len(members) - 1) / len(members) * size),
                level=index,
            )
            self._exchanges[members] = found
        return found

    def _ring(self, level: int, ranks: Sequence[int]) -> tuple[tuple[int, int], ...]:
        outgoing = list(dict.fromkeys(self._port(level, rank) for rank in ranks))
        return tuple((port, after + 1) for port, after in zip(outgoing, outgoing[1:] + outgoing[:1], strict=True))

    def _port(self, level: int, rank: int) -> int:
        """The outgoing port of `rank` at `level`; the incoming one is the next."""
        owner = rank
        if level and self._options.shared_ports:
            owner //= self._cluster.group_size(level - 1)
        return self._ports.setdefault((level, owner), 2 * len(self._ports))
