"""The order of forwards, backwards and updates on one rank, schedule by schedule; messages are added in programs.py.

    pipedream      F F F (F B U)(F B U) … B U B U    never flushes; warm-up forwards fill the pipeline (SOSP'19)
    pipedream_2bw  F F F (F B)(F B U) …              the same, one update in `accumulate` mini-batches (ICML'21)
    1f1b           F F (F B)(F B) B B U │ F F …      the pipeline runs empty before each update (PipeDream-Flush)
    gpipe          F F F F B B B B U │ F F …         all forwards, then all backwards (NeurIPS'19)

Warm-up. A stage with r replicas that is followed by n ranks (its own other replicas and all of the later stages)
does `n // r` forwards before its first backward, the rule of PipeDream's runtime. It never deadlocks, whatever the
replicas and transfers (sends do not block, receives and the update's collective do). Proof: let stage s have warm-up
w, and delay d = w·r in mini-batches. Give the forward of mini-batch k the date k on every stage, its backward the date
k + d, and an update the date of the last backward it gathers. Then everything an action waits for has an earlier date,
or the same date and an earlier place in the pipeline:

- a forward waits for earlier stages' forwards of k; on its rank it follows the backward of k - (w+1)·r, and the update
  behind that one, of date at most k - r + (r-1) < k, since all members of an update lie within r of its last one;
- a backward waits for later stages' backwards of k, dated k + d' with d' <= d: the n of the next stage is n' = n - r,
  hence d > n - r = n' >= d'; on its rank it follows the forward of k + w·r = k + d and backwards of smaller k.

Growing replicas (1-3) are no exception, nor are deeper warm-ups, which add to n a number that falls along the pipeline.
Updates may be shared by any number of mini-batches that leaves no replica out.

An order answers to mini-batches as they arrive, because a run does not know how many will come; a program for a given
number is what it answers to so many arrivals and the end.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

from pl_pipe.schedule.actions import BACKWARD, FORWARD, UPDATE, Action


class Order(Protocol):
    """The forwards, backwards and updates of one rank."""

    def arrive(self, batch: int) -> Iterator[Action]:
        """What the rank does when `batch` comes. Batches come in their order, `stride` apart."""

    def finish(self) -> Iterator[Action]:
        """What is left to do when no more will come. Afterwards nothing is in flight, and more may come after all."""


class NeverFlush:
    """PipeDream's 1F1B, and 2BW's: warm-up forwards, then forward and backward in turn, then the backwards left."""

    def __init__(self, warmup: int, update_every: int, stride: int = 1) -> None:
        self._warmup = warmup
        self._update_every = update_every
        self._stride = stride
        self._in_flight: deque[int] = deque()
        self._not_applied: int | None = None
        """The last mini-batch whose gradient waits for its update."""

    def arrive(self, batch: int) -> Iterator[Action]:
        yield Action(FORWARD, batch)
        self._in_flight.append(batch)
        if len(self._in_flight) > self._warmup:
            yield from self._backward()

    def finish(self) -> Iterator[Action]:
        while self._in_flight:
            yield from self._backward()
        if self._not_applied is not None:
            yield Action(UPDATE, self._not_applied)
            self._not_applied = None

    def _backward(self) -> Iterator[Action]:
        batch = self._in_flight.popleft()
        yield Action(BACKWARD, batch)
        self._not_applied = batch
        if self._ends_update(batch):
            yield Action(UPDATE, batch)
            self._not_applied = None

    def _ends_update(self, batch: int) -> bool:
        return (batch + self._stride) // self._update_every != batch // self._update_every


class Flush(NeverFlush):
    """1F1B within each group of mini-batches that share an update, and nothing in flight between groups."""

    def arrive(self, batch: int) -> Iterator[Action]:
        yield from super().arrive(batch)
        if self._ends_update(batch):
            yield from self.finish()


class AllForwardsFirst(Flush):
    """GPipe: the forwards of a group, then its backwards in the same order."""

    def __init__(self, _warmup: int, update_every: int, stride: int = 1) -> None:
        super().__init__(update_every, update_every, stride)


MakeOrder: TypeAlias = Callable[[int, int, int], Order]
"""(warm-up of the rank, mini-batches that share an update, distance between the rank's mini-batches) -> its order."""

ORDERS: dict[str, MakeOrder] = {
    "pipedream": NeverFlush,
    "pipedream_2bw": NeverFlush,
    "1f1b": Flush,
    "gpipe": AllForwardsFirst,
}
