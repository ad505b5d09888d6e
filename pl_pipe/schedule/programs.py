"""Every rank's program for a plan: compute orders with messages around. plan -> *schedule* -> simulate, runtime.

Mini-batch k is handled by replica `k mod replicas` of each stage (1F1B-RR of PipeDream, SOSP'19), so all peers follow
from its number, and the same list drives the simulator and the executor.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pl_pipe.errors import ScheduleError
from pl_pipe.partition import Plan
from pl_pipe.schedule.actions import (
    BACKWARD,
    FORWARD,
    RECEIVE_ACTIVATION,
    RECEIVE_GRADIENT,
    SEND_ACTIVATION,
    SEND_GRADIENT,
    UPDATE,
    Action,
)
from pl_pipe.schedule.orders import ORDERS, Order

SCHEDULES = tuple(ORDERS)
FLUSHING = frozenset({"1f1b", "gpipe"})
Update = Literal["minibatch", "round"]


@dataclass(frozen=True)
class Programs:
    """What each rank does, in order, for `batches` mini-batches."""

    schedule: str
    batches: int
    stages: tuple[tuple[int, ...], ...]
    """The ranks of each stage; mini-batch k runs on the one at place `k mod replicas`."""
    update_every: tuple[int, ...]
    """By stage: mini-batches `[n * every, (n + 1) * every)` share update n, a collective of all its replicas."""
    in_flight: Mapping[int, int]
    """By rank: the most mini-batches between forward and backward at a time."""
    by_rank: Mapping[int, tuple[Action, ...]]
    """In the order of the pipeline."""
    vertical_sync_warmup: int | None = None
    """With vertical sync, the mini-batches by which the first stage's weights lag; see `versions`."""

    @cached_property
    def stage_of(self) -> dict[int, int]:
        return {rank: stage for stage, ranks in enumerate(self.stages) for rank in ranks}

    @property
    def flushes(self) -> bool:
        return self.schedule in FLUSHING

    @property
    def actions(self) -> int:
        return sum(map(len, self.by_rank.values()))

    @cached_property
    def update_members(self) -> tuple[list[tuple[int, ...]], ...]:
        """By stage and ordinal, the ranks whose updates of that ordinal form one collective; fewer at a run's end."""
        return tuple(map(self._members, self.stages))

    def _members(self, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        counts = {rank: sum(action.kind is UPDATE for action in self.by_rank[rank]) for rank in ranks}
        members = [ranks] * min(counts.values())
        for ordinal in range(len(members), max(counts.values())):
            members.append(tuple(rank for rank, count in counts.items() if count > ordinal))
        return members


def warmups(plan: Plan, deeper: float = 0.0) -> tuple[int, ...]:
    """By stage, the forwards of a replica before its first backward; orders.py says why they are enough.

    `deeper` adds that many mini-batches for each rank of a later stage. The published rule (0) keeps just enough in
    flight to feed every rank, so that a mini-batch's way over the links is waited for; at 1 there is as much again to
    do meanwhile, at the price of as many more activations and weight versions.
    """
    found = []
    following, later = plan.ranks - 1, plan.ranks
    for stage in plan.stages:
        later -= stage.replicas
        found.append(int(following + deeper * later) // stage.replicas)
        following -= stage.replicas
    return tuple(found)


def least_accumulate(plan: Plan, schedule: str, deeper: float = 0.0) -> int:
    """The fewest mini-batches that may share an update.

    Every replica must have one of them, or its weights would part from the others'. 2BW also needs that no forward
    wants a version before it is made: the first forward of a group comes after the update of the last group but one
    only if a whole group covers the first stage's warm-up.
    """
    every_replica = max(plan.replicas)
    if schedule == "pipedream_2bw":
        return max(every_replica, warmups(plan, deeper)[0] * plan.replicas[0])
    return every_replica


def build_programs(
    plan: Plan,
    *,
    schedule: str,
    batches: int,
    accumulate: int | None = None,
    update: Update = "round",
    deeper: float = 0.0,
    vertical_sync: bool = False,
) -> Programs:
    """The programs of all ranks of `plan`.

    `update` is for `pipedream`: after each local backward (`minibatch`, the paper's rule), or once in a round, the
    mini-batches after which every replica has had equally many. `accumulate` is for the other schedules: the
    mini-batches that share an update; by default as many whole rounds as keep every rank busy. `deeper` keeps more
    mini-batches in flight than there are ranks, so that slow links are hidden (`warmups`). `vertical_sync` is for
    `pipedream`: all stages read the same weight version for a mini-batch.

    `batches` need not fill the last update: that one then gathers what there is, and replicas without a mini-batch in
    it have no part in the collective. A run that goes on afterwards must feed whole rounds.
    """
    if schedule not in ORDERS:
        raise ScheduleError(f"schedule={schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
    if batches < 1:
        raise ScheduleError(f"batches={batches}; a schedule takes 1 mini-batch or more")
    if not 0 <= deeper < math.inf:
        raise ScheduleError(f"deeper={deeper}; give 0 (as published) or more, 1 doubles what is in flight")
    if vertical_sync and schedule != "pipedream":
        raise ScheduleError(
            f"vertical_sync=true, but schedule={schedule} reads one version on all stages anyway; leave it out"
        )
    every = _update_every(plan, schedule, accumulate, update, deeper)
    by_rank: dict[int, tuple[Action, ...]] = {}
    in_flight: dict[int, int] = {}
    for index, (stage, warmup) in enumerate(zip(plan.stages, warmups(plan, deeper), strict=True)):
        messages = _Messages(plan, index)
        for place, rank in enumerate(stage.ranks):
            own = range(place, batches, stage.replicas)
            order = ORDERS[schedule](warmup, every[index], stage.replicas)
            by_rank[rank] = tuple(messages.around(_all_of(order, own)))
            together = len(own)
            if schedule in FLUSHING:
                together = min(together, -(-every[index] // stage.replicas))
            in_flight[rank] = together if schedule == "gpipe" else min(together, warmup + 1)
    return Programs(
        schedule=schedule,
        batches=batches,
        stages=tuple(stage.ranks for stage in plan.stages),
        update_every=every,
        in_flight=in_flight,
        by_rank=by_rank,
        vertical_sync_warmup=warmups(plan, deeper)[0] * plan.replicas[0] if vertical_sync else None,
    )


def _update_every(plan: Plan, schedule: str, accumulate: int | None, update: str, deeper: float) -> tuple[int, ...]:
    if update not in ("minibatch", "round"):
        raise ScheduleError(f"update={update} is unknown; choose minibatch or round")
    if accumulate is not None and accumulate < 1:
        raise ScheduleError(f"accumulate={accumulate}; an update takes 1 mini-batch or more")
    if schedule == "pipedream":
        return plan.replicas if update == "minibatch" else (plan.round,) * len(plan.stages)
    if accumulate is None:
        busy = max(plan.ranks, least_accumulate(plan, schedule, deeper))
        accumulate = -(-busy // plan.round) * plan.round
    least = least_accumulate(plan, schedule, deeper)
    if accumulate < least:
        if least > max(plan.replicas):
            why = f"{plan.shape} keeps {least} mini-batches in flight, so two weight versions would not be enough"
        else:
            why = f"{plan.shape} has a stage with {least} replicas, and some would have no mini-batch in an update"
        raise ScheduleError(f"accumulate={accumulate}, but {why}; set accumulate={least} or more")
    return (accumulate,) * len(plan.stages)


def _all_of(order: Order, batches: Iterable[int]) -> Iterator[Action]:
    for batch in batches:
        yield from order.arrive(batch)
    yield from order.finish()


class _Messages:
    """The messages that one stage receives and sends for a mini-batch, by the plan's transfers."""

    def __init__(self, plan: Plan, stage: int) -> None:
        pairs = sorted({(transfer.source, transfer.target) for transfer in plan.transfers})
        self._before = [plan.stages[source].ranks for source, target in pairs if target == stage]
        self._after = [plan.stages[target].ranks for source, target in pairs if source == stage]

    def around(self, order: Iterable[Action]) -> Iterator[Action]:
        """Receives before, and sends behind, each forward and backward of `order`."""
        for action in order:
            batch = action.batch
            if action.kind is FORWARD:
                for ranks in self._before:
                    yield Action(RECEIVE_ACTIVATION, batch, ranks[batch % len(ranks)])
                yield action
                for ranks in self._after:
                    yield Action(SEND_ACTIVATION, batch, ranks[batch % len(ranks)])
            elif action.kind is BACKWARD:
                for ranks in self._after:
                    yield Action(RECEIVE_GRADIENT, batch, ranks[batch % len(ranks)])
                yield action
                for ranks in self._before:
                    yield Action(SEND_GRADIENT, batch, ranks[batch % len(ranks)])
            else:
                yield action
