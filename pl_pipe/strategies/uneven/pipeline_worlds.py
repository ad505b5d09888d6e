"""Several pipelines, each a world of its own: the default process group is the pipeline's. ranks -> *worlds* -> store.

all ranks ── one store ─┬─ pipeline 0: default process group of its stages    PipeDreamStrategy sees no more than
                        ├─ pipeline 1: default process group of its stages    this, and works as it does alone
                        └─ stage s of all pipelines: groups of `pl_pipe.comm.peers`, coordinator, tickets
"""

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch.distributed.rendezvous import rendezvous

from pl_pipe.comm.lifelines import Fault, Lifelines
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.uneven.placement import Placement


class Worlds:
    """One rank's: the store of all, and its pipeline as the default process group. They last as long as the process."""

    joined: "Worlds | None" = None

    def __init__(self, store: Any, placement: Placement, rank: int) -> None:
        self.store, self.placement, self.rank = store, placement, rank
        self.pipeline, self.stage = placement.place(rank)
        self.members = placement.members(self.pipeline)
        self.replicas = placement.stages[self.stage]
        """The ranks of this rank's stage, one in each pipeline."""
        self._gathered = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A process has one; so has a copy of what holds it."""
        return _joined, ()

    @classmethod
    def join(
        cls, environment: ClusterEnvironment, placement: Placement, rank: int, *, timeout: timedelta, **group: Any
    ) -> "Worlds":
        """By all ranks; a process that has joined before stays where it is."""
        if dist.is_initialized():
            if cls.joined is None or cls.joined.placement != placement:
                raise ConfigError(
                    "this process has a process group already, of another strategy or of other pipelines; train with "
                    "this one in a script of its own"
                )
            return cls.joined
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        store, _, _ = next(rendezvous("env://", rank, len(placement.devices), timeout=timeout))
        cls.joined = worlds = cls(store, placement, rank)
        own = dist.distributed_c10d.PrefixStore(f"pl_pipe/pipeline{worlds.pipeline}", store)
        _init_dist_connection(
            environment, "gloo", worlds.members.index(rank), len(worlds.members), timeout=timeout, store=own, **group
        )
        return worlds

    def gathered(self, content: Any) -> list[Any]:
        """Every rank's, of all pipelines; all must ask at the same points."""
        name, self._gathered = f"pl_pipe/gathered{self._gathered}", self._gathered + 1
        self.store.set(f"{name}/{self.rank}", json.dumps(content))
        return [json.loads(self.store.get(f"{name}/{rank}")) for rank in range(len(self.placement.devices))]


def _joined() -> Worlds | None:
    return Worlds.joined


class PipelineLines:
    """The lifelines of all ranks, as one pipeline's own: for what its ranks agree on among themselves."""

    def __init__(self, lifelines: Lifelines, members: Sequence[int], pipeline: int) -> None:
        self.rank = members.index(lifelines.rank)
        self._lifelines, self._members, self._pipeline = lifelines, members, pipeline

    @property
    def first(self) -> Fault | None:
        return self._lifelines.first

    def send(self, note: Any) -> None:
        self._lifelines.send({"pipeline": self._pipeline, "note": note})

    def passed_on(self, hear: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
        """What hears the lifelines of all, for one that hears the pipeline's."""

        def hear_all(rank: int, note: Any) -> None:
            if isinstance(note, dict) and note.get("pipeline") == self._pipeline:
                hear(self._members.index(rank), note["note"])

        return hear_all
