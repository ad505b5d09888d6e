"""What a rank is to receive, one message at a time. engine -> *inbox* -> sharing.

The pipeline's receivers ask for one message after another, the oldest mini-batch's first (`pl_pipe.comm.arrivals`), and
nothing travels before it is asked for. So senders that are ready together do not share the way into their receiver:

    ready       7 8 9
    received    7 ├ 8 ├ 9

What the rank stands still for is asked for at once, beside whatever is on its way.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from pl_pipe.simulate.links import Route


@dataclass(slots=True)
class Message:
    """An activation or a gradient that a rank has handed over."""

    batch: int
    source: int
    target: int
    stage: int
    """The sender's."""
    issued_s: float
    route: Route

    @property
    def key(self) -> tuple[int, int]:
        """The oldest mini-batch first; tells messages to one rank apart."""
        return self.batch, self.source


@dataclass(slots=True)
class Inbox:
    """One rank's."""

    _ready: dict[tuple[int, int], Message] = field(default_factory=dict)
    _order: list[tuple[int, int]] = field(default_factory=list)
    _under_way: int = 0

    def add(self, message: Message, *, wanted: bool) -> bool:
        """Whether it comes at once: if the rank stands still for it, or nothing else is on its way."""
        if wanted or not self._under_way:
            self._under_way += 1
            return True
        self._ready[message.key] = message
        heappush(self._order, message.key)
        return False

    def want(self, batch: int, source: int) -> Message | None:
        """The rank stands still for this one, which then comes; None if it is not ready, or on its way."""
        message = self._ready.pop((batch, source), None)
        if message is not None:
            self._under_way += 1
        return message

    def came(self) -> Message | None:
        """One is here; whose turn it is now."""
        self._under_way -= 1
        while self._order and not self._under_way:
            message = self._ready.pop(heappop(self._order), None)
            if message is not None:
                self._under_way += 1
                return message
        return None
