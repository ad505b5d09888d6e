"""Messages on their way out: kept until they have left. transports -> *Outbox* -> torch.distributed.

A send's buffer must not be freed before the message has left, and gloo says that it has only to one who waits for it.
So an outbox waits, for messages that are so old that their receivers are known to have come by: nobody stands still
for that, and what is kept stays bounded.
"""

from collections import deque
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.waiting import Wait, wait_for


class Outbox:
    """Sends, with numbers which may be those of batches; they are waited for in the order in which they were added.

    Numbers may fall back: gradients of earlier batches leave among the activations of later ones.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sending: deque[tuple[int, Any, Tensor, int]] = deque()

    def __len__(self) -> int:
        return len(self._sending)

    def add(self, number: int, work: Any, buffer: Tensor, target: int) -> None:
        self._sending.append((number, work, buffer, target))

    def clear(self) -> None:
        """Lets go of all messages, whether they have left or not."""
        self._sending.clear()

    def settle(self, *, before: int | None = None) -> None:
        """Waits for all messages, or up to the first whose number is not less than `before`, and lets go of them."""
        while self._sending and (before is None or self._sending[0][0] < before):
            _, work, _, target = self._sending.popleft()
            wait_for(work, partial(_leaving, target), timeout_s=self._timeout_s)


def _leaving(target: int) -> Wait:
    return Wait(f"rank {dist.get_rank()}", f"rank {target} to take a message", [target])
