"""Lightning's collectives as meetings at the coordinator, which a dead worker does not hold up.

strategy.reduce, broadcast, barrier, metrics -> *Assembly* -> CoordinatorClient

Within a batch nobody meets: workers are at different batches, and each answers for itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from pl_pipe.comm.coordination import CoordinatorClient
from pl_pipe.errors import StageError
from pl_pipe.tensors.trees import map_tensors

_OPERATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda stacked: stacked.mean(0),
    "avg": lambda stacked: stacked.mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "prod": lambda stacked: stacked.prod(0),
}


class Assembly:
    """One worker's part; all that live come to the same meetings in the same order."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self.inside_batch = False
        self.batches = 0
        """That this worker has begun, of training and evaluations."""
        self.members: list[int] = []
        """Who came to the last meeting."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Within the block a worker trains on a batch, or evaluates one."""
        self.batches += 1
        before, self.inside_batch = self.inside_batch, True
        try:
            yield
        finally:
            self.inside_batch = before

    def meet(self, content: Any, about: str) -> dict[int, Any]:
        found = self._client.meet(content, about)
        self.members = sorted(found)
        return found

    def barrier(self) -> None:
        if not self.inside_batch:
            self.meet(None, "wait at a barrier")

    def broadcast(self, content: Any, source: int = 0) -> Any:
        if self.inside_batch:
            return content
        found = self.meet(content if self._client.worker == source else None, f"hear rank {source}")
        if source not in found:
            raise StageError(f"rank {source} has ended, and was to tell the others something; rank 0 is sure to live")
        return found[source]

    def reduce(self, tensor: Any, operation: Any = "mean") -> Any:
        if self.inside_batch or not isinstance(tensor, Tensor):
            return tensor
        name = str(operation or "sum").lower().rpartition(".")[2]
        if name not in _OPERATIONS:
            raise StageError(f"reduce_op={operation} is not known here; choose one of {', '.join(_OPERATIONS)}")
        found = self.meet(tensor.detach().cpu(), f"reduce a value ({name})")
        stacked = torch.stack([found[worker] for worker in self.members])
        if name in ("mean", "avg") and not stacked.is_floating_point():
            stacked = stacked.to(torch.get_default_dtype())
        return _OPERATIONS[name](stacked).to(tensor.device)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Every worker's; shapes may differ."""
        if self.inside_batch:
            return [tensor]
        found = self.meet(tensor.detach().cpu(), "gather a tensor")
        return [found[worker].to(tensor.device) for worker in self.members]

    def all_gather(self, content: Any) -> Any:
        if self.inside_batch:
            raise StageError(
                "all_gather within a step waits for the same step of all workers, which are at different batches; "
                "gather in on_train_epoch_end or on_validation_epoch_end, or log a torchmetrics metric"
            )
        return map_tensors(content, lambda tensor: torch.stack(self.gathered(tensor)))

    def agrees(self, decision: bool, *, all_: bool) -> bool:
        if self.inside_batch:
            return decision
        votes = self.meet(bool(decision), "vote").values()
        return all(votes) if all_ else any(votes)

    @contextmanager
    def evaluations_of(self, trainer: Any) -> Iterator[None]:
        """Within the block the trainer's evaluations take a batch and its hooks as one; numbers of batches differ."""

        def alone(step: Callable[..., None], *args: Any) -> None:
            with self.batch():
                step(*args)

        loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        for loop in loops:
            vars(loop)["_evaluation_step"] = partial(alone, loop._evaluation_step)
        try:
            yield
        finally:
            for loop in loops:
                del vars(loop)["_evaluation_step"]

    @contextmanager
    def metrics_of(self, module: nn.Module) -> Iterator[None]:
        """Within the block the module's torchmetrics gather their states here."""

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:  # noqa: ARG001
            return self.gathered(tensor)

        metrics = [metric for metric in module.modules() if isinstance(metric, Metric) and metric.dist_sync_fn is None]
        for metric in metrics:
            metric.dist_sync_fn = gather
        try:
            yield
        finally:
            for metric in metrics:
                metric.dist_sync_fn = None
