"""What the links between ranks give. TrafficWatch, measured latencies -> *monitors* -> loggers, policies."""

from typing import Any

import lightning as L
import torch.distributed as dist
from typing_extensions import override

from pl_pipe.adapt.monitors.base import Monitor, patience_of, require_equal_steps
from pl_pipe.comm.topology import AdaptableSums, LinksToCome
from pl_pipe.comm.topology.latencies import measure_latencies
from pl_pipe.comm.topology.traffic import TrafficWatch
from pl_pipe.errors import ConfigError

_CLOCKS = 200
"""Steps after which clocks are compared anew: they part by some microseconds a second."""


def adaptable_sums(monitor: L.Callback, trainer: L.Trainer) -> AdaptableSums:
    """Those of the strategy; refuses one that leaves its sums to the backend."""
    found = getattr(trainer.strategy, "sums", None)
    if not isinstance(found, AdaptableSums):
        raise ConfigError(
            f"{type(monitor).__name__} watches the messages of strategy=adaptive on several ranks, and this is "
            f"{type(trainer.strategy).__name__} on {trainer.world_size}; set strategy=adaptive trainer.devices=2 or "
            f"more, or remove it"
        )
    return found


class LinkThroughput(Monitor):
    """Logs `link_<from>_<to>_mb_per_s` by the time that messages were in flight; a late sender makes no slow link.

    What a step has measured is told while the next one computes: nobody waits for a busy link to tell that it is busy.
    What such a link tells too late for that counts in the next step.
    Sums by the backend itself (topology native) have no messages that could be watched.
    """

    def __init__(self, *, interval: int = 1) -> None:
        super().__init__(interval=interval)
        self.links: list[list[tuple[float, float]]] = []
        """Bytes and seconds in flight in a step, by receiver and sender; the same on all ranks."""
        self.measured_step = -1
        """In which that was: the one before the present, with an interval of 1."""
        self.every = 1
        """How often a step is watched: a policy that need not know each one's spares the others what it costs."""
        self._to_come: tuple[LinksToCome, int] | None = None
        self._resting: TrafficWatch | None = None
        self._watched = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.links, self.measured_step, self._to_come = [], -1, None
        self.every, self._resting = 1, None
        adaptable_sums(self, trainer).watch_traffic(watching=False)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._resting is not None:  # one of several batches of a step
            return
        sums = adaptable_sums(self, trainer)
        watches = self.is_due(trainer) and not sums.topology.is_native
        if watches != (sums.summing.watch is not None):
            sums.watch_traffic(watching=watches)
        if trainer.global_step % self.every:
            self._resting, sums.summing.watch = sums.summing.watch, None

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.is_step(trainer):
            return
        self._hear(trainer)
        sums = adaptable_sums(self, trainer)
        if self._resting is not None:
            sums.summing.watch, self._resting = self._resting, None
            return
        if sums.summing.watch is None:
            return
        self._watched += 1
        renews = self._watched % _CLOCKS == 0
        if renews or self.interval > 1:  # this watch will not hear what comes later
            sums.summing.watch.settle()
        self._to_come = sums.links(), trainer.global_step - 1
        if renews:
            sums.watch_traffic()

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._hear(trainer)

    def _hear(self, trainer: L.Trainer) -> None:
        if self._to_come is None:
            return
        (links, self.measured_step), self._to_come = self._to_come, None
        self.links = links.wait()
        values = {}
        for receiver, row in enumerate(self.links):
            for sender, (size_bytes, in_flight_s) in enumerate(row):
                if in_flight_s > 0:
                    values[f"link_{sender}_{receiver}_mb_per_s"] = size_bytes / in_flight_s / 1e6
        self.report(trainer, values, step=self.measured_step)


class PeerLatencies(Monitor):
    """Logs `latency_<rank>_<rank>_ms`: half of the way there and back, measured between steps that all ranks take."""

    def __init__(self, *, interval: int = 100) -> None:
        super().__init__(interval=interval)
        self.latencies_s: list[list[float]] = []
        self._group: Any = None

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        require_equal_steps(self, trainer)
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=patience_of(trainer))

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._group is None or not self.is_step(trainer) or not self.was_due(trainer):
            return
        self.latencies_s = measure_latencies(self._group)
        values = {
            f"latency_{one}_{other}_ms": 1e3 * self.latencies_s[one][other]
            for one in range(trainer.world_size)
            for other in range(one + 1, trainer.world_size)
        }
        self.report(trainer, values, step=trainer.global_step - 1)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
