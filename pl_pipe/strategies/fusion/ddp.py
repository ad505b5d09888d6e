"""Fusion over several devices: each has the whole array and a share of every batch; gradients are averaged.

Every rank trains all variants on its own batches, as Lightning's DDP would train one model: samplers are divided,
buffers are rank 0's, gradients of all variants travel together.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from pl_pipe.errors import FusionError, refuse_other_lightning
from pl_pipe.strategies.fusion.array_width import whole_bytes
from pl_pipe.strategies.fusion.fused_variants import FusedVariants
from pl_pipe.strategies.fusion.launcher import FusionLauncher


class FusionDDPStrategy(FusedVariants, DDPStrategy):
    """Trains variants of a LightningModule as one array, data parallel. It is launched as Lightning launches DDP.

    The arguments are FusionStrategy's, and those of DDPStrategy that are not about torch's DistributedDataParallel.
    """

    strategy_name = "fusion_ddp"
    _averages_gradients = True
    _options_beneath = ("parallel_devices", "cluster_environment", "process_group_backend", "timeout", "start_method")

    def __init__(
        self,
        variants: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None,
        *,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **options: Any,
    ) -> None:
        super().__init__(
            variants,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            **options,
        )

    @override
    def _configure_launcher(self) -> None:
        refuse_other_lightning(self.accelerator)
        DDPStrategy._configure_launcher(self)
        self._launcher = FusionLauncher(self, self._launcher)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        self._check_same_array()
        self._from_rank_0([parameter.detach() for module in self._modules() for parameter in module.parameters()])

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._buffers_from_rank_0()
        return super().training_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self._buffers_from_rank_0()
        super().on_validation_start()

    @override
    def on_test_start(self) -> None:
        self._buffers_from_rank_0()
        super().on_test_start()

    @override
    def on_predict_start(self) -> None:
        self._buffers_from_rank_0()
        super().on_predict_start()

    @override
    def _average_gradients(self) -> None:
        groups = [group for place in self.composite.active for group in self.composite.own[place].param_groups]
        parameters = [one for group in groups for one in group["params"] if one.requires_grad]
        used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32, device=self.root_device)
        dist.all_reduce(used)
        gradients = []
        for parameter, users in zip(parameters, used.tolist(), strict=True):
            if users:  # by some rank; what none has used has no gradient, as in a run of one process
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for alike in _by_type(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in alike])
            dist.all_reduce(flat)
            _put(flat / self.world_size, alike)

    @override
    def stop_variants(self, numbers: Sequence[int], why: str = "stopped") -> None:
        """Rank 0's: metrics that are not brought together differ between ranks, and would keep other variants."""
        super().stop_variants(*self.broadcast((list(numbers), why)))

    @override
    def _largest(self, numbers: Sequence[float]) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self.root_device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(number) for number in found]

    @override
    def _room(self) -> int:
        """Arrays are made before ranks can speak to one another; what is free would differ between them."""
        return whole_bytes(self.root_device, self.num_processes)

    def _check_same_array(self) -> None:
        assert self.training is not None
        arrays: list[Any] = [None] * self.world_size
        dist.all_gather_object(arrays, [variant.number for variant in self.training.variants])
        for rank, numbers in enumerate(arrays):
            if numbers != arrays[0]:
                raise FusionError(
                    f"rank {rank} would train the variants {numbers}, and rank 0 {arrays[0]}: their devices have "
                    f"different memory; set max_array={min(len(numbers), len(arrays[0]))}"
                )

    @override
    def _agreed(self, width: int) -> int:
        least = torch.tensor(width, device=self.root_device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def _modules(self) -> list[L.LightningModule]:
        assert self.training is not None
        return self.training.members.modules

    def _buffers_from_rank_0(self) -> None:
        """When an evaluation begins, and not with each batch: ranks may have different numbers of them."""
        self._from_rank_0([buffer for module in self._modules() for buffer in module.buffers()])

    def _from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        for alike in _by_type(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            dist.broadcast(flat, 0)
            _put(flat, alike)


def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.data.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()


def _by_type(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())
