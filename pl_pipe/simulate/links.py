"""Ports of the cluster and the messages that queue on them. cluster -> *links* -> engine.

    rank 0 ─┐                              ┌─ rank 4
            ├─ host 0 ─out═══════in─ host 1 ─┤          a message takes the ports of the level where its ends meet:
    rank 1 ─┘                              └─ rank 5    out of the sender's side, then into the receiver's

A port serves messages one by one in the order they come to it. A message comes to the incoming port once the outgoing
one has begun with it, so on idle ports it takes its size over the bandwidth; while it waits for a busy receiver, its
sender's port is free for others, as behind a switch. Incoming and outgoing ports are apart: bandwidth holds each way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pl_pipe.partition import Plan
from pl_pipe.simulate.options import SimulationOptions


@dataclass(frozen=True, slots=True)
class Route:
    """What one message from a rank to another takes."""

    out_port: int
    in_port: int
    wire_s: float
    """How long each of the two ports is taken."""
    latency_s: float
    size_bytes: int
    level: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one all-reduce among ranks takes."""

    ports: tuple[int, ...]
    """All that each slice passes."""
    slices: int
    wire_s: float
    """How long each slice takes each port."""
    latency_s: float
    """Of each slice, behind it."""
    size_bytes: int
    """What each member sends, as in a ring."""
    level: int


class Links:
    """Routes by pair of ranks, and until when each port is taken."""

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
        self.free_s: list[float] = []
        """By port, when it has served all that was issued so far."""

    def route(self, source: int, target: int) -> Route:
        """For an activation or, the other way, its gradient."""
        found = self._routes.get((source, target))
        if found is None:
            first, second = sorted((self._stage_of[source], self._stage_of[target]))
            size = round(self._sizes[first, second] / self._options.activation_compression_ratio)
            index = self._cluster.meeting_level((source, target))
            level = self._levels[index]
            found = Route(
                out_port=self._port(index, source),
                in_port=self._port(index, target) + 1,
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
            wire_s = level.all_reduce_s(size, len(members)) - latency_s
            slices = self._options.all_reduce_slices if wire_s else 1
            found = Exchange(
                ports=self._both_ports(index, members),
                slices=slices,
                wire_s=wire_s / slices,
                latency_s=latency_s / slices,
                size_bytes=round(2 * (len(members) - 1) / len(members) * size),
                level=index,
            )
            self._exchanges[members] = found
        return found

    def _both_ports(self, level: int, ranks: Sequence[int]) -> tuple[int, ...]:
        outgoing = dict.fromkeys(self._port(level, rank) for rank in ranks)
        return tuple(port + way for port in outgoing for way in (0, 1))

    def _port(self, level: int, rank: int) -> int:
        """The outgoing port of `rank` at `level`; the incoming one is the next."""
        owner = rank
        if level and self._options.shared_ports:
            owner //= self._cluster.group_size(level - 1)
        port = self._ports.setdefault((level, owner), len(self.free_s))
        if port == len(self.free_s):
            self.free_s += (0.0, 0.0)
        return port
