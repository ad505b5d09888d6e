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
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

from pl_pipe.schedule.actions import BACKWARD, FORWARD, UPDATE, Action

Order: TypeAlias = Callable[[Sequence[int], int, int], Iterator[Action]]
"""(mini-batches of the rank, its warm-up, mini-batches that share an update) -> its forwards, backwards and updates."""


def never_flush(batches: Sequence[int], warmup: int, update_every: int) -> Iterator[Action]:
    """PipeDream's 1F1B, and 2BW's: warm-up forwards, then forward and backward in turn, then the backwards left."""
    for batch in batches[:warmup]:
        yield Action(FORWARD, batch)
    for place, batch in enumerate(batches):
        if place + warmup < len(batches):
            yield Action(FORWARD, batches[place + warmup])
        yield Action(BACKWARD, batch)
        last = place + 1 == len(batches)
        if last or batches[place + 1] // update_every != batch // update_every:
            yield Action(UPDATE, batch)


def flush(batches: Sequence[int], warmup: int, update_every: int) -> Iterator[Action]:
    """1F1B within each group of mini-batches that share an update, and nothing in flight between groups."""
    for _, group in groupby(batches, key=lambda batch: batch // update_every):
        yield from never_flush(list(group), warmup, update_every)


def all_forwards_first(batches: Sequence[int], _warmup: int, update_every: int) -> Iterator[Action]:
    """GPipe: the forwards of a group, then its backwards in the same order."""
    for _, group in groupby(batches, key=lambda batch: batch // update_every):
        members = list(group)
        yield from never_flush(members, len(members), update_every)


ORDERS: dict[str, Order] = {
    "pipedream": never_flush,
    "pipedream_2bw": never_flush,
    "1f1b": flush,
    "gpipe": all_forwards_first,
}
