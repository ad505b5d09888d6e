"""What the ranks of a pipeline are to Lightning: one process. *this* <- PipeDreamStrategy <- SDPipeStrategy.

A rank is no data-parallel worker: batches are not shared out among ranks, and there is nothing to average or gather.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from typing_extensions import override

from pl_pipe.partition import Plan
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.strategies.pipeline.hook_steps import HooksEnded, LossesTold
from pl_pipe.tensors.ghosts import outside_steps


class PipelineRanks(DDPStrategy):
    """Launched as Lightning launches DDP, and asked about ranks as DDP is; it answers as a single process would."""

    is_all_there_is = True
    """No other pipelines train with this one."""
    hooks_ended: HooksEnded | None = None
    losses_told: LossesTold | None = None
    has_whole_gradients = False
    """A rank has those of its stage."""

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        return tensor  # one pipeline, one result: there is nothing to average over

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor  # as in a single process; what a step computes is on one rank, and no copy of it on the others

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not _distributed_is_initialized():  # a callback is called by hand, before any run
            return decision
        with outside_steps():
            votes = torch.tensor(int(decision))
            torch.distributed.all_reduce(votes)
            return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._waiting(), outside_steps():
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.world_size == 1:  # not even pickled
            return obj
        with self._waiting(), outside_steps():
            return super().broadcast(obj, src)

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.hooks_ended is None else self.hooks_ended.waiting()

    # ---- what several pipelines do with one another; a single one does nothing

    @property
    def reports(self) -> bool:
        """This rank has the pipeline's loss, and what the step logs."""
        return self.global_rank == 0

    @property
    def stops_within_epochs(self) -> bool:
        """Not where others are in step with this pipeline, and know nothing of what its ranks agree on."""
        return True

    @property
    def spanned_nodes(self) -> int:
        """Over which the pipeline lies."""
        return self.num_nodes

    def arranged(self, plan: Plan) -> Plan:
        """The plan as the ranks have to follow it."""
        return plan

    def gradient_averaging(self, divided: DividedModel) -> tuple[GradientAveraging | None, int]:
        """What adds up gradients, and over how many pipelines."""
        return divided.averaging(), 1

    def counted(self, loader: Any) -> Any:
        """A training loader as long as it will be, where it is asked for before there are others' shares."""
        return loader

    def before_update(self) -> None:
        """Gradients are in place, and the weights that are to change are nobody's but the update's."""

    def after_update(self) -> None:
        """The optimizer has changed them."""
