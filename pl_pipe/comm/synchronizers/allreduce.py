"""`allreduce`: gradients are averaged over all workers while backward runs, as DistributedDataParallel does."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from pl_pipe.comm.synchronizers.port import Rule, StepFacts, Worker


class GradientSums(Protocol):
    """As `pl_pipe.runtime.gradient_averaging` has it, which stands above this layer."""

    def watch(self, leaves: Mapping[str, Tensor]) -> None: ...

    def finish(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, mini_batches: int, averaged: int
    ) -> dict[str, Tensor]: ...


class AllReduce(Rule):
    lockstep = True

    def __init__(self, worker: Worker, sums: GradientSums) -> None:
        super().__init__(worker)
        self._sums = sums

    def begin_backward(self) -> None:
        self._sums.watch(self._trained())

    def before_update(self) -> None:
        trained = self._trained()
        gradients = {name: tensor.grad for name, tensor in trained.items() if tensor.grad is not None}
        count = len(self.worker.workers)
        averaged = self._sums.finish(trained, gradients, mini_batches=1, averaged=count)
        for name, gradient in averaged.items():
            tensor = trained[name]
            if tensor.grad is None:
                tensor.grad = gradient.clone()
            else:
                tensor.grad.copy_(gradient)
        self.facts = StepFacts(self.worker.workers)

    def _trained(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.worker.parameters.items() if tensor.requires_grad}
