"""The discrete-event loop: ranks follow their programs, messages share ports. schedule -> *engine* -> measures.

Whatever happens next in time is handled next (a heap of dates), so messages reach the ports in the order they are
issued. A rank stands in the heap at most once: when it ends a compute action or gets what it waited for. A flow stands
there with every end that was foreseen for it, of which the last one holds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from pl_pipe.errors import ScheduleError
from pl_pipe.events import Event
from pl_pipe.partition import Plan
from pl_pipe.schedule import Action, Programs
from pl_pipe.schedule.actions import BACKWARD, FORWARD, SEND_ACTIVATION, SEND_GRADIENT, UPDATE
from pl_pipe.simulate.inbox import Inbox, Message
from pl_pipe.simulate.links import Exchange, Links
from pl_pipe.simulate.options import SimulationOptions
from pl_pipe.simulate.sharing import Flow, Sharing


@dataclass(slots=True)
class RankTrace:
    """A rank's costs, its place in the program, and what it has done so far."""

    stage: int
    program: tuple[Action, ...]
    forward_s: float
    backward_s: float
    update_s: float
    update_batches: list[int]
    """The last mini-batch of each update, in order."""
    factors: list[float] | None
    """Jitter of each forward and backward."""
    place: int = 0
    updates: int = 0
    starts_s: list[float] = field(default_factory=list)
    """Of forwards and backwards."""
    ends_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Collective:
    """An all-reduce under way, or waiting for its members."""

    members: tuple[int, ...]
    exchange: Exchange
    batches: list[int]
    missing: int
    parts_left: int
    start_s: float = 0.0
    ready_s: float = 0.0
    """When the last member has its last gradient: the sum is not there before."""
    end_s: float | None = None
    waiters: list[int] = field(default_factory=list)


class Engine:
    """One run of a plan's programs; everything that is measured afterwards stands in its public fields."""

    def __init__(self, plan: Plan, programs: Programs, options: SimulationOptions) -> None:
        self.ranks: dict[int, RankTrace] = {
            rank: _rank_trace(plan, programs, options, rank) for rank in programs.by_rank
        }
        self.done_s = [0.0] * programs.batches
        """By mini-batch, when the last of its backwards ended."""
        self.makespan_s = 0.0
        self.events: list[Event] = []
        self.link_bytes: dict[tuple[int, int], int] = {}
        self.level_bytes = [0] * len(plan.cluster.levels)
        self.all_reduce_bytes = [0] * len(plan.cluster.levels)
        self._programs = programs
        self._options = options
        self._links = Links(plan, options)
        self._heap: list[tuple[float, int]] = []
        self._sharing = Sharing()
        self._inboxes: dict[int, Inbox] = defaultdict(Inbox)  # by rank
        self._arrivals_s: dict[tuple[int, int, int], float] = {}  # by mini-batch, sender, receiver
        self._waiting: set[tuple[int, int, int]] = set()
        self._collectives: dict[tuple[int, int], _Collective] = {}  # by stage and ordinal
        self._tickets = count(-(2**62))  # stand in the heap for flows; below all ranks, in order
        self._flows: dict[int, Flow] = {}
        self._streams: dict[tuple[int, int], np.random.Generator] = {}  # by sender and receiver

    def run(self) -> None:
        """To the end of the last action; raises where ranks wait for ever."""
        heap = self._heap
        heap.extend((0.0, rank) for rank in self.ranks)
        heapify(heap)
        while heap:
            now_s, who = heappop(heap)
            if who >= 0:
                self._advance(now_s, who)
                continue
            flow = self._flows.pop(who)
            if flow.ticket == who:
                self._foresee(self._sharing.end(now_s, flow))
                flow.then(now_s)
        stuck = [rank for rank, trace in self.ranks.items() if trace.place < len(trace.program)]
        if stuck:
            action = self.ranks[stuck[0]].program[self.ranks[stuck[0]].place]
            raise ScheduleError(
                f"{len(stuck)} ranks wait for ever, rank {stuck[0]} at {action}; `validate` says for whom they wait"
            )
        self.events.sort(key=lambda event: (event.start_s, event.rank))

    def _advance(self, now_s: float, rank: int) -> None:
        """Follows a rank's program until it must wait, or until something else comes first."""
        heap, trace = self._heap, self.ranks[rank]
        program, place = trace.program, trace.place
        while place < len(program):
            kind, batch, peer = program[place]
            then_s = now_s
            if kind is FORWARD:
                then_s = self._compute(now_s, rank, trace, trace.forward_s, batch, "forward")
            elif kind is BACKWARD:
                then_s = self._compute(now_s, rank, trace, trace.backward_s, batch, "backward")
                if self._options.overlap:
                    self._join(now_s, then_s, trace, batch)
                if then_s > self.done_s[batch]:
                    self.done_s[batch] = then_s
            elif kind is UPDATE:
                updated_s = self._update(now_s, rank, trace, batch)
                if updated_s is None:
                    trace.place = place
                    return
                then_s = updated_s
            elif kind is SEND_ACTIVATION or kind is SEND_GRADIENT:
                assert peer is not None, f"{program[place]} has no peer"
                self._send(now_s, rank, trace.stage, batch, peer)
            else:
                assert peer is not None, f"{program[place]} has no peer"
                arrival_s = self._arrivals_s.pop((batch, peer, rank), None)
                if arrival_s is None:
                    self._waiting.add((batch, peer, rank))
                    self._begin(now_s, self._inboxes[rank].want(batch, peer))
                    trace.place = place
                    return
                then_s = max(now_s, arrival_s)
            place += 1
            if then_s > now_s:
                if heap and heap[0] < (then_s, rank):
                    trace.place = place
                    heappush(heap, (then_s, rank))
                    return
                now_s = then_s
        trace.place = place
        self.makespan_s = max(self.makespan_s, now_s)

    def _compute(self, now_s: float, rank: int, trace: RankTrace, lasts_s: float, batch: int, kind: str) -> float:
        if trace.factors is not None:
            lasts_s *= trace.factors[len(trace.starts_s)]
        end_s = now_s + lasts_s
        trace.starts_s.append(now_s)
        trace.ends_s.append(end_s)
        if self._options.record_events:
            self.events.append(Event(rank, kind, now_s, end_s, batch, trace.stage))
        return end_s

    def _send(self, now_s: float, rank: int, stage: int, batch: int, peer: int) -> None:
        """Hands a message over; it travels when its receiver wants it, or has nothing older to receive."""
        route = self._links.route(rank, peer)
        pair = rank, peer
        self.link_bytes[pair] = self.link_bytes.get(pair, 0) + route.size_bytes
        self.level_bytes[route.level] += route.size_bytes
        message = Message(batch, rank, peer, stage, now_s, route)
        if self._inboxes[peer].add(message, wanted=(batch, rank, peer) in self._waiting):
            self._begin(now_s, message)

    def _begin(self, now_s: float, message: Message | None) -> None:
        if message is not None:
            wire_s = message.route.wire_s * self._link_factor(message.source, message.target)
            self._flow(now_s, message.route.ports, wire_s, partial(self._arrive, message))

    def _link_factor(self, source: int, target: int) -> float:
        sigma = self._options.link_jitter
        if not sigma:
            return 1.0
        stream = self._streams.get((source, target))
        if stream is None:
            stream = self._streams[source, target] = np.random.default_rng((self._options.seed, source, target))
        return float(stream.lognormal(-(sigma**2) / 2, sigma))

    def _arrive(self, message: Message, now_s: float) -> None:
        """Wakes the receiver if it waits, and lets the next message come."""
        route, key = message.route, (message.batch, message.source, message.target)
        end_s = now_s + route.latency_s
        if self._options.record_events:
            self.events.append(
                Event(
                    *(message.source, "send", message.issued_s, end_s, message.batch),
                    *(message.stage, message.target, route.size_bytes),
                )
            )
        self._arrivals_s[key] = end_s
        if key in self._waiting:
            self._waiting.remove(key)
            heappush(self._heap, (end_s, message.target))
        self._begin(now_s, self._inboxes[message.target].came())

    def _flow(self, now_s: float, ports: tuple[int, int], wire_s: float, then: Callable[[float], None]) -> None:
        if wire_s:
            self._foresee(self._sharing.begin(now_s, Flow(ports, wire_s, then)))
        else:
            then(now_s)

    def _foresee(self, changed: Iterable[Flow]) -> None:
        """Notes the ends of flows whose rates have changed."""
        for flow in changed:
            flow.ticket = next(self._tickets)
            self._flows[flow.ticket] = flow
            heappush(self._heap, (flow.end_s, flow.ticket))

    def _collective(self, trace: RankTrace) -> _Collective | None:
        """The all-reduce of the rank's next update; None where it is alone in it."""
        key = trace.stage, trace.updates
        found = self._collectives.get(key)
        if found is None:
            members = self._programs.update_members[trace.stage][trace.updates]
            if len(members) < 2:
                return None
            exchange = self._links.exchange(trace.stage, members)
            batches = [self.ranks[member].update_batches[trace.updates] for member in members]
            found = _Collective(members, exchange, batches, len(members), len(exchange.ring))
            self._collectives[key] = found
        return found

    def _join(self, now_s: float, ready_s: float, trace: RankTrace, batch: int) -> None:
        """Counts a member in if `batch` is the last that its next update gathers; the last member starts it.

        Its gradients come one by one until `ready_s`.
        """
        if batch != trace.update_batches[trace.updates]:
            return
        collective = self._collective(trace)
        if collective is not None:
            collective.ready_s = max(collective.ready_s, ready_s)
            collective.missing -= 1
            if not collective.missing:
                collective.start_s = now_s
                for ports in collective.exchange.ring:
                    self._flow(now_s, ports, collective.exchange.wire_s, partial(self._reduced, collective))

    def _reduced(self, collective: _Collective, now_s: float) -> None:
        """A member's part of an all-reduce is with the next one; behind the last part the sum is there."""
        collective.parts_left -= 1
        if collective.parts_left:
            return
        exchange = collective.exchange
        collective.end_s = end_s = max(now_s + exchange.latency_s, collective.ready_s)
        self.all_reduce_bytes[exchange.level] += exchange.size_bytes * len(collective.members)
        for rank in collective.waiters:
            heappush(self._heap, (end_s, rank))
        if self._options.record_events:
            for rank, batch in zip(collective.members, collective.batches, strict=True):
                span_s, stage = (collective.start_s, end_s), self.ranks[rank].stage
                self.events.append(Event(rank, "all_reduce", *span_s, batch, stage, None, exchange.size_bytes))

    def _update(self, now_s: float, rank: int, trace: RankTrace, batch: int) -> float | None:
        """When the rank's update ends; None if its all-reduce is not yet over, and the rank comes again when it is."""
        collective = self._collective(trace)
        if collective is not None:
            if collective.end_s is None and not self._options.overlap:
                self._join(now_s, now_s, trace, batch)
            if collective.end_s is None:
                collective.waiters.append(rank)
                return None
            now_s = max(now_s, collective.end_s)
        trace.updates += 1
        if self._options.record_events:
            self.events.append(Event(rank, "update", now_s, now_s + trace.update_s, batch, trace.stage))
        return now_s + trace.update_s


def _rank_trace(plan: Plan, programs: Programs, options: SimulationOptions, rank: int) -> RankTrace:
    index = programs.stage_of[rank]
    stage = plan.stages[index]
    program = programs.by_rank[rank]
    factor = options.slowdown.get(rank, 1.0)
    factors: list[float] | None = None
    if options.jitter:
        computes = sum(action.kind in (FORWARD, BACKWARD) for action in program)
        stream = np.random.default_rng((options.seed, rank))
        factors = stream.lognormal(-(options.jitter**2) / 2, options.jitter, computes).tolist()
    return RankTrace(
        stage=index,
        program=program,
        forward_s=stage.forward_s * factor,
        backward_s=stage.backward_s * factor,
        update_s=options.update_s * factor,
        update_batches=[action.batch for action in program if action.kind is UPDATE],
        factors=factors,
    )
