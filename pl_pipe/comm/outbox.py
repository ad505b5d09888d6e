"""Messages on their way out: kept until they have left. transports -> *Outbox* -> torch.distributed.

A send's buffer must not be freed before the message has left, and gloo says that it has only to one who waits for it.
So an outbox waits, for messages that are so old that their receivers are known to have come by: nobody stands still
for that, and what is kept stays bounded.
"""

from collections import deque
from datetime import timedelta
from typing import Any

from torch import Tensor


class Outbox:
    """Sends in the order of their numbers, which may be those of batches."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._sending: deque[tuple[int, Any, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._sending)

    def add(self, number: int, work: Any, buffer: Tensor) -> None:
        self._sending.append((number, work, buffer))

    def settle(self, *, before: int | None = None) -> None:
        """Waits for all messages, or for those with a number less than `before`, and lets go of them."""
        while self._sending and (before is None or self._sending[0][0] < before):
            _, work, _ = self._sending.popleft()
            work.wait(self._timeout)
