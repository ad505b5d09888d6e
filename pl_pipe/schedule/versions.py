"""Which weights each mini-batch meets. programs -> *versions* -> simulate (memory), runtime (what to stash).

Version n is the weights after n updates of a stage. A mini-batch's backward uses the version of its forward (weight
stashing, PipeDream SOSP'19). `pipedream` and the flushing schedules read the newest version there is; `pipedream_2bw`
reads the one that all stages have by then: group g, which makes version g + 1, runs on version g - 1 everywhere
(W(t+1) = W(t) - v·∇f(W(t-1)), ICML'21), so its delay is the same on the first and on the last stage. `vertical_sync`
of `pipedream` lets every stage read the version that the first one has when the mini-batch enters.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pl_pipe.errors import ScheduleError
from pl_pipe.schedule.actions import BACKWARD, FORWARD, UPDATE
from pl_pipe.schedule.programs import Programs

Reading: TypeAlias = Callable[[int, int], int]
"""(mini-batch, newest version) -> the version that its forward reads, which never falls with later mini-batches."""


def reading_of(schedule: str, *, update_every: int, vertical_sync_warmup: int | None = None) -> Reading:
    """Which version the forwards of a schedule read. Vertical sync needs to know the first stage's warm-up."""
    if schedule == "pipedream_2bw":
        return lambda batch, _newest: max(batch // update_every - 1, 0)
    if vertical_sync_warmup is not None:
        return lambda batch, _newest: max(batch - vertical_sync_warmup, 0) // update_every
    return lambda _batch, newest: newest


@dataclass(frozen=True, slots=True)
class BackwardVersion:
    """The weights behind one gradient."""

    batch: int
    version: int
    """Updates that the forward, and so the backward, saw."""
    staleness: int
    """Updates made between that version and the one the gradient is applied to."""


@dataclass(frozen=True, slots=True)
class RankVersions:
    """The weight versions of one rank over its program."""

    backwards: tuple[BackwardVersion, ...]
    """In the order of the program."""
    kept: int
    """Most versions needed at a time: those of mini-batches in flight, and the newest."""

    @property
    def max_staleness(self) -> int:
        return max((backward.staleness for backward in self.backwards), default=0)


def weight_versions(programs: Programs) -> dict[int, RankVersions]:
    """By rank, what each backward's weights are and how many versions must be kept."""
    return {rank: _versions_of(programs, rank) for rank in programs.by_rank}


def _versions_of(programs: Programs, rank: int) -> RankVersions:
    stage = programs.stage_of[rank]
    every = programs.update_every[stage]
    reading = reading_of(programs.schedule, update_every=every, vertical_sync_warmup=programs.vertical_sync_warmup)
    seen: dict[int, int] = {}
    users = {0: 0}  # of each version kept, the mini-batches in flight on it
    backwards: list[BackwardVersion] = []
    newest, kept = 0, 1
    to_come = deque(action.batch for action in programs.by_rank[rank] if action.kind is FORWARD)
    for action in programs.by_rank[rank]:
        batch = action.batch
        if action.kind is FORWARD:
            version = reading(batch, newest)
            if version not in users:
                state = "does not exist yet" if version > newest else "is no longer kept"
                raise ScheduleError(
                    f"rank {rank} runs {action} on weight version {version}, which {state} after {newest} updates; "
                    f"let more than {every} mini-batches share an update"
                )
            seen[batch] = version
            users[version] += 1
            to_come.popleft()
        elif action.kind is BACKWARD:
            version = seen.pop(batch)
            backwards.append(BackwardVersion(batch, version, newest - version))
            users[version] -= 1
        elif action.kind is UPDATE:
            newest += 1
            users[newest] = 0
            oldest = reading(to_come[0], newest) if to_come else newest
            users = {version: count for version, count in users.items() if count or version >= oldest}
            kept = max(kept, len(users))
    return RankVersions(tuple(backwards), kept)
