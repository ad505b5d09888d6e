"""`strategy="adaptive"`: data parallel over a topology that can change. Lightning's hooks -> *strategy* -> sums.

torch's DistributedDataParallel fills buckets while backward goes on; its communication hook has each summed over the
topology of the moment, on a thread. Between steps the topology may be switched, by all ranks to the same one.

    backward    g9 g8 g7 │ g6 g5 g4 │ g3 g2 g1 │ step │ switch?
    sums                 └─ bucket 0 ─► └─ bucket 1 ─►
"""

import inspect
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from pl_pipe.adapt.policies.topology import InterferencePolicy
from pl_pipe.checks import check_numbers
from pl_pipe.comm.consensus import require_consensus
from pl_pipe.comm.topology import (
    AUTO,
    SPANNING_TREE,
    AdaptableSums,
    SumGroups,
    Topology,
    checked_setting,
    topology_of,
)
from pl_pipe.errors import ConfigError, refuse_other_lightning
from pl_pipe.log import get_logger
from pl_pipe.strategies.checkpoint_io import AtomicCheckpointIO
from pl_pipe.strategies.peer_faults import START_S, PeerFaults
from pl_pipe.strategies.pipeline.launcher import PipelineLauncher
from pl_pipe.strategies.pipeline.signals import serve_signals

log = get_logger(__name__)

BACKENDS = (None, "gloo", "nccl")
_LAUNCH = {
    name
    for of in (DDPStrategy, DistributedDataParallel)
    for name in inspect.signature(of).parameters
    if name not in ("kwargs", "module", "process_group_backend", "timeout", "gradient_as_bucket_view")
}
"""What Lightning and torch know besides."""


class AdaptiveCommStrategy(DDPStrategy):
    """Trains as DDP does, with sums over a topology; it is launched as Lightning launches DDP."""

    def __init__(
        self,
        topology: str | Sequence[int] = "auto",
        adapt: bool = True,
        bucket_cap_mb: float = 25.0,
        piece_mb: float = 2.0,
        find_unused_parameters: bool = False,
        backend: str | None = None,
        timeout_s: float = 300.0,
        **launch: Any,
    ) -> None:
        """
        Args:
            topology: a name (`pl_pipe.comm.topology.NAMES`), `star@RANK`, or a father for each rank.
            adapt: ranks watch their links, and change the topology while other traffic slows most of them down.
            bucket_cap_mb: gradients leave in buckets of so many MB while backward goes on.
            piece_mb: what travels at a time.
            find_unused_parameters: as in DDP.
            backend: of the native sum; `gloo`, `nccl`, or by the devices.
            timeout_s: how long a rank waits for another before it is an error.
            launch: what Lightning gives to DDPStrategy (accelerator, parallel_devices, cluster_environment …).
        """
        check_numbers(bucket_cap_mb=bucket_cap_mb, piece_mb=piece_mb, timeout_s=timeout_s)
        for name, value in {"bucket_cap_mb": bucket_cap_mb, "piece_mb": piece_mb, "timeout_s": timeout_s}.items():
            if not value > 0:
                raise ConfigError(f"{name}={value} must be more than 0; leave it out for the default")
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend} is unknown; choose gloo, nccl or null")
        if not isinstance(adapt, bool):
            raise ConfigError(f"adapt={adapt!r}; give true or false")
        unknown = [name for name in launch if name not in _LAUNCH]
        if unknown:
            own = ", ".join(name for name in inspect.signature(AdaptiveCommStrategy).parameters if name != "launch")
            raise ConfigError(f"{unknown[0]}={launch[unknown[0]]!r} is no option of strategy=adaptive; it has {own}")
        hooks = [name for name in ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper") if launch.get(name)]
        if hooks:
            raise ConfigError(
                f"{hooks[0]} is given, but strategy=adaptive sums gradients itself; leave it out, or set strategy=ddp"
            )
        self.setting = checked_setting(topology)
        self.adapt = adapt
        self._piece_bytes = max(1, int(piece_mb * (1 << 20)))
        start = timedelta(seconds=max(START_S, float(timeout_s)))  # processes may begin at very different times
        super().__init__(
            process_group_backend=backend,
            timeout=start,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=True,
            **launch,
        )
        self.faults = PeerFaults(timeout_s=float(timeout_s))
        self.leaves_together = False
        """All ranks end at the same point, so that they may still save what they have."""
        self.sums: AdaptableSums | None = None
        """While fitting with several ranks."""
        self._fits_alone = False
        self._stack = ExitStack()
        self._failed = False

    @property
    def topology(self) -> Topology | None:
        """What gradients are summed over now."""
        return None if self.sums is None else self.sums.topology

    def switch_topology(self, topology: str | Sequence[int] | Topology) -> None:
        """By all ranks, between steps. Where they ask for different ones, all get an error and nothing changes.

        One rank alone has nobody to sum with: what it asks for is checked, and that is all.
        """
        if self._fits_alone:
            _check_for_one(topology)
            return
        if self.sums is None:
            raise ConfigError(
                "there is no topology to switch outside of trainer.fit; call it between two steps, as in a callback's "
                "on_train_batch_end, or give strategy.topology to begin with another one"
            )
        wanted = topology if isinstance(topology, Topology) else self.sums.resolved(topology)
        before = self.sums.topology
        self.sums.switch(wanted)
        if self.is_global_zero:
            log.info("topology: %s -> %s", before.name, wanted.name)

    # ---- setup and teardown

    @override
    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"  # ranks also tell each other numbers that no device has
        return super()._get_process_group_backend()

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
        ranks = (self.cluster_environment, self.num_processes, self.num_nodes)
        self._launcher = PipelineLauncher(*ranks, faults=self.faults, explain=self._explained)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.leaves_together = False
        self._checkpoint_io = self._checkpoint_io or AtomicCheckpointIO()
        self.faults.begin()

    @override
    def setup(self, trainer: L.Trainer) -> None:
        self._failed = False
        self._stack = ExitStack()
        super().setup(trainer)
        if self.sums is not None:
            # A collective in every batch would send its messages over the links that are slow.
            serve_signals(self, trainer, self.faults, self._stack)
            self._add_policy(trainer)

    def _add_policy(self, trainer: L.Trainer) -> None:
        """For the time of this run, unless the user has given one, or wants none."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        given = any(isinstance(callback, InterferencePolicy) for callback in callbacks)
        if given and not self.adapt:
            raise ConfigError(
                "strategy.adapt=false, and policy=interference would change the topology; leave one of them out"
            )
        if given or not self.adapt:
            return
        before = list(callbacks)
        policy = InterferencePolicy()
        callbacks.append(policy)
        policy.setup(trainer, trainer.lightning_module, "fit")
        self._stack.callback(callbacks.__setitem__, slice(None), before)

    @override
    def _register_ddp_hooks(self) -> None:
        if self.world_size == 1:
            _check_for_one(self.setting)
            self._fits_alone = True
            return
        assert isinstance(self.model, DistributedDataParallel)
        _check_dense(self.model.module)
        timeout_s = self.faults.timeout_s
        self.sums = AdaptableSums(
            self.setting,
            (socket.gethostname(), self.node_rank),
            native=dist.group.WORLD,
            groups=SumGroups.of(range(self.world_size), timeout_s=timeout_s),
            timeout_s=timeout_s,
            piece_bytes=self._piece_bytes,
            gradient_bytes=sum(one.nbytes for one in self.model.parameters() if one.requires_grad),
            device=self.root_device,
        )
        require_consensus(self.adapt, what="strategy.adapt", remedy="give all ranks the same", group=self.sums.control)
        self._tell_topology()
        self.model.register_comm_hook(None, lambda _state, bucket: self._summed(bucket))

    def _tell_topology(self) -> None:
        assert self.sums is not None
        if self.is_global_zero:
            measured = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in self.sums.trials.items())
            log.info("topology: %s%s", self.sums.topology.name, f" (measured: {measured})" if measured else "")

    def _summed(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: the mean over all ranks, divided first as DDP does."""
        assert self.sums is not None
        if self.sums.topology.is_native:
            assert dist.group.WORLD is not None
            return allreduce_hook(dist.group.WORLD, bucket)
        tensor = bucket.buffer().div_(self.world_size)
        devices = None if tensor.device.type == "cpu" else [tensor.device]
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)

        def ended(error: Exception | None) -> None:
            if error is None:
                future.set_result(tensor)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        self.sums.summing.start(tensor, on_end=ended)
        return future

    def drain(self) -> None:
        """Nothing is in flight between steps."""

    def _explained(self, error: BaseException, _trainer: L.Trainer | None) -> BaseException:
        if self.world_size == 1 or self.leaves_together:
            return error
        self._failed = True
        return self.faults.explained(error)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True  # other ranks may be anywhere: no collective from here on
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._stack.close()
        if self.sums is not None:
            self.sums.close(together=not self._failed)
            self.sums = None
        self._fits_alone = False
        self.faults.end()
        super().teardown()


def _check_dense(module: nn.Module) -> None:
    """Refuses layers whose gradients are lists of rows, of which ranks have different ones."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise ConfigError(
                f"{name} has sparse=True, and strategy=adaptive sums dense gradients only; make it with sparse=False, "
                f"or choose strategy=ddp"
            )


def _check_for_one(topology: str | Sequence[int] | Topology) -> None:
    """Refuses what is no topology, or one that is made for more ranks."""
    if not isinstance(topology, Topology):
        if topology not in (AUTO, SPANNING_TREE):  # there is nothing to measure
            topology_of(topology, ["this"])
    elif topology.ranks != 1:
        raise ConfigError(
            f"the topology {topology.name} is made for {topology.ranks} ranks, there is 1; make it for those there are"
        )
