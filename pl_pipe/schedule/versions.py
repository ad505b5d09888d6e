"""Which weights each mini-batch meets. programs -> *versions* -> simulate (memory), runtime (what to stash).

Version n is the weights after n updates of a stage. A mini-batch's backward uses the version of its forward (weight
stashing, PipeDream SOSP'19). `pipedream` and the flushing schedules read the newest version there is; `pipedream_2bw`
reads the one that all stages have by then: group g, which makes version g + 1, runs on version g - 1 everywhere
(W(t+1) = W(t) - v·∇f(W(t-1)), ICML'21), so its delay is the same on the first and on the last stage.
"""

from dataclasses import dataclass

from pl_pipe.errors import ScheduleError
from pl_pipe.schedule.actions import BACKWARD, FORWARD, UPDATE
from pl_pipe.schedule.programs import Programs


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
    every = programs.update_every[programs.stage_of[rank]]
    behind = 1 if programs.schedule == "pipedream_2bw" else 0  # forwards to come may want the newest but this many
    seen: dict[int, int] = {}
    users = {0: 0}  # of each version kept, the mini-batches in flight on it
    backwards: list[BackwardVersion] = []
    newest, kept = 0, 1
    for action in programs.by_rank[rank]:
        batch = action.batch
        if action.kind is FORWARD:
            version = max(batch // every - 1, 0) if behind else newest
            if version not in users:
                state = "does not exist yet" if version > newest else "is no longer kept"
                raise ScheduleError(
                    f"rank {rank} runs {action} on weight version {version}, which {state} after {newest} updates; "
                    f"let more than {every} mini-batches share an update"
                )
            seen[batch] = version
            users[version] += 1
        elif action.kind is BACKWARD:
            version = seen.pop(batch)
            backwards.append(BackwardVersion(batch, version, newest - version))
            users[version] -= 1
            if not users[version] and version < newest - behind:
                del users[version]
        elif action.kind is UPDATE:
            newest += 1
            users[newest] = 0
            if users.get(newest - behind - 1) == 0:
                del users[newest - behind - 1]
            kept = max(kept, len(users))
    return RankVersions(tuple(backwards), kept)
