"""Sums whose topology can be measured and changed while a run goes on. strategy -> *AdaptableSums* -> TopologySumming.

All of its calls are collective: the ranks that sum together make them at the same points, between sums.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.comm.common_clock import CommonClock, read_clocks
from pl_pipe.comm.consensus import require_consensus
from pl_pipe.comm.summing import DistributedSumming
from pl_pipe.comm.topology.choice import AUTO, SPANNING_TREE, Setting, candidates, topology_of
from pl_pipe.comm.topology.latencies import measure_latencies
from pl_pipe.comm.topology.mailbox import DistributedMailbox
from pl_pipe.comm.topology.summing import PIECE_BYTES, TopologySumming
from pl_pipe.comm.topology.traffic import TrafficWatch
from pl_pipe.comm.topology.trees import NATIVE, Topology
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger

log = get_logger(__name__)

_CPU = torch.device("cpu")
LEAST_TRIAL_BYTES, MOST_TRIAL_BYTES, WHOLE_TRIAL_BYTES = 256 << 10, 4 << 20, 24 << 20
_TURNS = 3
_CLEARLY = 0.95
"""Of the native sum's time: what another topology must stay below to be taken in its place."""


class SumGroups(NamedTuple):
    """Two process groups of the ranks that sum together: for messages, and for what they tell each other."""

    messages: Any
    control: Any

    @classmethod
    def of(cls, ranks: Sequence[int], *, timeout_s: float) -> "SumGroups":
        """To be called by all ranks of the run at the same point."""
        timeout = timedelta(seconds=timeout_s)
        return cls(*(dist.new_group(list(ranks), backend="gloo", timeout=timeout) for _ in range(2)))


class LinksToCome:
    """On their way from the other ranks, over links that may be busy: the caller may have other things to do."""

    def __init__(self, work: Any, everyone: Sequence[Tensor]) -> None:
        self._work, self._everyone = work, everyone

    def wait(self) -> list[list[tuple[float, float]]]:
        self._work.wait()
        return [[(row[0], row[1]) for row in one.tolist()] for one in self._everyone]


class AdaptableSums:
    """One rank's end."""

    def __init__(
        self,
        setting: Setting,
        host: Hashable,
        *,
        native: Any,
        groups: SumGroups,
        timeout_s: float,
        piece_bytes: int = PIECE_BYTES,
        gradient_bytes: int = WHOLE_TRIAL_BYTES,
        device: torch.device = _CPU,
    ) -> None:
        """
        Args:
            host: this rank's.
            native: the process group of the native sum.
            groups: of the same ranks; they are given back by `close`.
            gradient_bytes: of a step, by which trials are as large as they must be.
            device: where gradients lie, and so what is summed in trials: by it, the native sum may be NCCL's.
        """
        self._ranks = dist.get_process_group_ranks(groups.control)
        self._gradient_bytes, self._device = gradient_bytes, device
        self._groups, self.control = groups, groups.control
        self.hosts = self._gathered(host)
        require_consensus(
            {"topology": setting if isinstance(setting, str) else list(setting), "piece_bytes": piece_bytes},
            what="the topology and its pieces",
            remedy="give all ranks the same",
            group=self.control,
        )
        mailbox = DistributedMailbox(groups.messages, self._ranks, timeout_s=timeout_s)
        self.summing = TopologySumming(
            topology_of(NATIVE, self.hosts),
            mailbox,
            native=DistributedSumming(native, self._ranks, timeout_s=timeout_s),
            piece_bytes=piece_bytes,
        )
        self.trials: Mapping[str, float] = {}
        """What `auto` has measured: seconds of a small sum."""
        self.summing.switch(self.resolved(setting))

    @property
    def topology(self) -> Topology:
        return self.summing.topology

    @property
    def ranks(self) -> int:
        return len(self._ranks)

    def resolved(self, setting: Setting) -> Topology:
        """What the setting means for these ranks: `auto` and the spanning tree are measured."""
        if setting == AUTO:
            found = candidates(self.hosts)
            self.trials = self.trial(found)
            return chosen(found, self.trials)
        latencies_s = measure_latencies(self.control) if setting == SPANNING_TREE else None
        return topology_of(setting, self.hosts, latencies_s=latencies_s)

    def switch(self, topology: Topology) -> None:
        """From the next sum on, if all ranks ask for the same one; else an error on all, and nothing has changed."""
        require_consensus(
            f"{topology.name} ({topology.digest()})",
            what="the topology to switch to",
            remedy="decide by what all ranks know; the old one stays",
            group=self.control,
        )
        if topology.ranks != self.ranks:
            raise ConfigError(
                f"{topology.name} is a topology of {topology.ranks} rank(s), and {self.ranks} sum together; make it "
                f"for so many, or give its name"
            )
        self.summing.switch(topology)

    def trial(self, topologies: Sequence[Topology], *, turns: int = _TURNS, whole: bool = False) -> dict[str, float]:
        """Seconds that a sum takes over each, by its slowest rank, known to all. A small one, unless it is to be whole.

        Args:
            whole: the sum is as large as a step's, if that is not too much. A short one tells less: connections that
                share a link take some time to come to their shares of it.
        """
        before, watch = self.summing.topology, self.summing.watch
        size_bytes = whole_trial_bytes(self._gradient_bytes) if whole else trial_bytes(self._gradient_bytes)
        tensor = torch.zeros(size_bytes // 4, device=self._device)
        times_s: list[list[float]] = [[] for _ in topologies]
        self.summing.watch = None
        try:
            for _ in range(turns):
                for topology, found_s in zip(topologies, times_s, strict=True):
                    self.summing.switch(topology)
                    self._catch_up()
                    dist.barrier(self.control)
                    begin_s = time.perf_counter()
                    self.summing.start(tensor).wait()
                    self._catch_up()
                    found_s.append(self.slowest(time.perf_counter() - begin_s))
        finally:
            self.summing.switch(before)
            self.summing.watch = watch
        return {topology.name: min(found_s) for topology, found_s in zip(topologies, times_s, strict=True)}

    def slowest(self, seconds: float) -> float:
        """The most of what the ranks give."""
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.item()

    @property
    def whole_trials_a_step(self) -> float:
        """As how many whole trials a step sums as much."""
        return self._gradient_bytes / whole_trial_bytes(self._gradient_bytes)

    def _catch_up(self) -> None:
        """A GPU may be behind this thread: with the step before, and with a sum that NCCL has only put in its queue."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def watch_traffic(self, *, watching: bool = True) -> None:
        """Whether messages are timed from now on; their clock is rank 0's as it stands now."""
        if self.summing.watch is not None:
            self.summing.watch.close()
        self.summing.watch = None
        if watching:
            reading = read_clocks(group=self.control)
            self.summing.watch = TrafficWatch(CommonClock(reading, reading).common_s)

    def links(self) -> LinksToCome:
        """Bytes and seconds in flight since this was last asked, by receiver and sender; known to all ranks."""
        own = torch.zeros(self.ranks, 2, dtype=torch.float64)
        if self.summing.watch is not None:
            for peer, use in self.summing.watch.take().items():
                own[peer] = torch.tensor([use.size_bytes, use.in_flight_s])
        everyone = [torch.empty_like(own) for _ in self._ranks]
        return LinksToCome(dist.all_gather(everyone, own, group=self.control, async_op=True), everyone)

    def close(self, *, together: bool) -> None:
        """
        Args:
            together: all ranks close; else others may be anywhere, and the groups are left to the process's end.
        """
        self.summing.close()
        if together:
            for group in self._groups:
                dist.destroy_process_group(group)

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * len(self._ranks)
        dist.all_gather_object(found, value, group=self.control)
        return found


def trial_bytes(gradient_bytes: int) -> int:
    """Of a trial: a quarter of a step's gradients, but enough to tell links apart, and no more than that takes."""
    return min(max(gradient_bytes // 4, LEAST_TRIAL_BYTES), MOST_TRIAL_BYTES)


def whole_trial_bytes(gradient_bytes: int) -> int:
    """Of one that is to be like a step's sums."""
    return min(max(gradient_bytes, LEAST_TRIAL_BYTES), WHOLE_TRIAL_BYTES)


def chosen(topologies: Sequence[Topology], seconds: Mapping[str, float]) -> Topology:
    """The quickest; the first, which is native, unless another is clearly quicker."""
    best = min(topologies, key=lambda topology: seconds[topology.name])
    first = topologies[0]
    return best if seconds[best.name] < _CLEARLY * seconds[first.name] else first
