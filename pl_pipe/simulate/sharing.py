"""Flows that meet at a port share it, as TCP connections do. links -> *sharing* -> engine.

    a ══╗                        a and b meet on their way out of one rank: each has half of that port
        ╠═ out ─┬─ in ═ a        c meets b on its way in, where b takes half: c has the other half
    b ══╝       └─ in ═ b, c     once a has ended, b could have its whole port, but c shares the other: half each

Shares are max-min fair: a flow is as fast as the fullest of its ports lets it be, and what it cannot use there goes to
the others. Only flows that are joined by ports to one that begins or ends are looked at; and where no more than two
meet on any port, as nearly always, only those that it meets: who meets another has half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way over two ports at once."""

    ports: tuple[int, int]
    """Out of the one side, into the other."""
    left_s: float
    """What is left at `since_s`: how long it would take its ports, had it them alone."""
    then: Callable[[float], None]
    """Told when it ends."""
    rate: float = 0.0
    """Its share of its ports."""
    since_s: float = 0.0
    ticket: int = 0
    """The last date of its end that was noted; earlier ones do not hold any more."""

    @property
    def end_s(self) -> float:
        """When it ends unless its rate changes."""
        return self.since_s + self.left_s / self.rate


class Sharing:
    """Who is on which port, and how fast."""

    def __init__(self) -> None:
        self._on: dict[int, dict[Flow, None]] = {}
        """By port; a dictionary keeps the order, so that a run is the same every time."""
        self._crowded = 0
        """Ports with more than two."""

    def begin(self, now_s: float, flow: Flow) -> list[Flow]:
        """Those that have another rate now, the new one among them."""
        out, into = (self._on.setdefault(port, {}) for port in flow.ports)
        out[flow] = into[flow] = None
        flow.since_s = now_s
        self._crowded += (len(out) == 3) + (len(into) == 3)
        return self._share(now_s, out | into, crowded=self._crowded > 0)

    def end(self, now_s: float, flow: Flow) -> list[Flow]:
        """Those that have another rate now that this one is gone."""
        out, into = (self._on[port] for port in flow.ports)
        crowded = self._crowded > 0
        del out[flow], into[flow]
        self._crowded -= (len(out) == 2) + (len(into) == 2)
        return self._share(now_s, out | into, crowded=crowded)

    def _share(self, now_s: float, touched: dict[Flow, None], *, crowded: bool) -> list[Flow]:
        changed = []
        rates = _fair_rates(*self._joined(touched)) if crowded else self._halves(touched)
        for flow, rate in rates.items():
            if rate != flow.rate:
                flow.left_s = max(flow.left_s - (now_s - flow.since_s) * flow.rate, 0.0)
                flow.since_s, flow.rate = now_s, rate
                changed.append(flow)
        return changed

    def _halves(self, flows: dict[Flow, None]) -> dict[Flow, float]:
        on = self._on
        return {flow: 1.0 if len(on[flow.ports[0]]) == len(on[flow.ports[1]]) == 1 else 0.5 for flow in flows}

    def _joined(self, touched: dict[Flow, None]) -> tuple[list[Flow], dict[int, dict[Flow, None]]]:
        """All that any change of these could reach, and the ports they are on."""
        found = set(touched)
        flows = list(touched)
        ports: dict[int, dict[Flow, None]] = {}
        for flow in flows:  # which grows meanwhile
            for port in flow.ports:
                if port not in ports:
                    on = ports[port] = self._on[port]
                    for other in on:
                        if other not in found:
                            found.add(other)
                            flows.append(other)
        return flows, ports


def _fair_rates(flows: list[Flow], ports: dict[int, dict[Flow, None]]) -> dict[Flow, float]:
    """Progressive filling: all rates rise together, and those on a port that is full stay where they are."""
    rising = {port: len(on) for port, on in ports.items()}
    free = dict.fromkeys(ports, 1.0)
    order = [(1 / count, port) for port, count in rising.items()]
    heapify(order)
    rates: dict[Flow, float] = {}
    while len(rates) < len(flows):
        share, port = heappop(order)
        if not rising[port]:
            continue
        now = free[port] / rising[port]
        if now > share:  # others on it are held up elsewhere
            heappush(order, (now, port))
            continue
        for flow in ports[port]:
            if flow not in rates:
                rates[flow] = share
                for crossed in flow.ports:
                    free[crossed] -= share
                    rising[crossed] -= 1
    return rates
