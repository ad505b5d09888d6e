"""Numbers that are given out once each, to whoever asks first. workers' samplers -> *Tickets* -> the group's store."""

from collections import Counter
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist

_CLOSED = 1 << 40


class Tickets(Protocol):
    """One worker's end."""

    def take(self, epoch: int) -> int:
        """The next number of an epoch, from 0."""

    def close(self, epoch: int) -> None:
        """From now on all numbers of the epoch are too large for anything."""


class StoreTickets:
    """Counters in the store of the default process group: the worker's own thread asks, nobody decides."""

    def __init__(self, name: str, store: Any | None = None) -> None:
        found: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._counters: Any = dist.distributed_c10d.PrefixStore(f"{name}/tickets", found.clone())

    def take(self, epoch: int) -> int:
        return int(self._counters.add(str(epoch), 1)) - 1

    def close(self, epoch: int) -> None:
        self._counters.add(str(epoch), _CLOSED)

    def forget(self, epoch: int) -> None:
        """By one worker, when none asks for the epoch any more."""
        self._counters.delete_key(str(epoch))


class TogetherTickets:
    """Numbers that several ranks take as one, such as the stages of a pipeline: who comes first takes it for all."""

    def __init__(self, tickets: StoreTickets, name: str, store: Any) -> None:
        """
        Args:
            name: the same on the ranks that take together, and on no others.
        """
        self._tickets = tickets
        self._told: Any = dist.distributed_c10d.PrefixStore(f"{name}/told", store.clone())
        self._taken: Counter[int] = Counter()
        """By this rank, of each epoch."""

    def take(self, epoch: int) -> int:
        which, self._taken[epoch] = f"{epoch}/{self._taken[epoch]}", self._taken[epoch] + 1
        if int(self._told.add(f"{which}/asked", 1)) == 1:
            number = self._tickets.take(epoch)
            self._told.set(which, str(number))
            return number
        return int(self._told.get(which))

    def close(self, epoch: int) -> None:
        self._tickets.close(epoch)

    def forget(self, epoch: int, *, of_all: bool) -> None:
        """By one of these ranks, when all have taken what they will; `of_all` by one of all ranks."""
        for number in range(self._taken.pop(epoch, 0)):
            self._told.delete_key(f"{epoch}/{number}")
            self._told.delete_key(f"{epoch}/{number}/asked")
        if of_all:
            self._tickets.forget(epoch)


class LocalTickets:
    """Workers in one process: the double."""

    def __init__(self) -> None:
        self._counters: dict[int, count[int]] = {}

    def take(self, epoch: int) -> int:
        return next(self._counters.setdefault(epoch, count()))

    def close(self, epoch: int) -> None:
        self._counters[epoch] = count(_CLOSED)
