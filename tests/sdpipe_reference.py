"""Several pipelines with delay, written out in one process: each stage with its weights, group by recorded group.

    batch k of a pipeline meets on stage s of S the weights after max(0, k - (S-1-s)) updates of that pipeline's stage;
    its update is number k there, and then the members of a group take the mean of their weights.

An epoch begins with all pipelines alike, and ends with the mean over all: of weights, and of the optimizer's momentum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from late_rule import STAGE_OF_LAYER
from pipedream_models import make
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

Weights = dict[str, Tensor]
RATE, MOMENTUM, DECAY = 0.2, 0.9, 0.01  # of pipedream_models.OPTIMIZERS["momentum"]


class Pipelines:
    """The weights of every stage of every pipeline, after each of its updates in an epoch; SGD with momentum."""

    def __init__(self, start: Mapping[str, Tensor], *, pipelines: int, depth: int) -> None:
        self.depth = depth
        self.model = make("Mlp").double()
        layers = STAGE_OF_LAYER[depth]
        names = [name for name, _ in self.model.named_parameters()]
        self.names = [[name for name in names if layers[int(name.split(".")[1])] == stage] for stage in range(depth)]
        self.now = [{name: start[name].double().clone() for name in names} for _ in range(pipelines)]
        self.momenta: list[Weights] = [{} for _ in range(pipelines)]

    def epoch(
        self,
        batches: Sequence[Sequence[Any]],
        groups: Sequence[Sequence[Sequence[int]]],
        *,
        every: int = 1,
        gradients: bool = False,
    ) -> None:
        """
        Args:
            batches: of each pipeline.
            groups: of each stage, in their order: the pipelines that averaged weights (or `gradients`).
            every: updates of a stage, of which the last ends in a group; it takes the others alone.
        """
        everyone = range(len(self.now))
        self.batches = batches
        self.versions: list[list[list[Weights]]] = [
            [[{name: self.now[p][name] for name in names}] for names in self.names] for p in everyone
        ]
        self.known: dict[tuple[int, int], Weights] = {}
        left = [list(of_stage) for of_stage in groups]
        moved = True
        while moved:
            moved = False
            for stage, waiting in enumerate(left):
                while (members := self._next(stage, waiting, every)) is not None:
                    self._update(members, stage, gradients=gradients)
                    moved = True
        assert not any(left), f"groups wait for each other: {left}"
        for p in everyone:
            assert all(len(versions) == len(batches[p]) + 1 for versions in self.versions[p])
        for names, stage in zip(self.names, range(self.depth), strict=True):
            for name in names:
                mean = torch.stack([self.versions[p][stage][-1][name] for p in everyone]).mean(0)
                momentum = torch.stack([self.momenta[p][name] for p in everyone]).mean(0)
                for p in everyone:
                    self.now[p][name], self.momenta[p][name] = mean, momentum

    def _next(self, stage: int, waiting: list[Sequence[int]], every: int) -> Sequence[int] | None:
        """Who can update that stage now: a pipeline alone, or the next group that met."""
        done = [len(of_pipeline[stage]) - 1 for of_pipeline in self.versions]
        for p, count in enumerate(done):
            if (count + 1) % every and count < len(self.batches[p]) and self._may_update(p, stage):
                return (p,)
        if waiting and all((done[p] + 1) % every == 0 and self._may_update(p, stage) for p in waiting[0]):
            return waiting.pop(0)
        return None

    def _may_update(self, p: int, stage: int) -> bool:
        k = len(self.versions[p][stage]) - 1
        return all(len(self.versions[p][other]) > self._met(k, other) for other in range(self.depth))

    def _met(self, k: int, stage: int) -> int:
        return max(0, k - (self.depth - 1 - stage))

    def _gradients(self, p: int, k: int) -> Weights:
        if (p, k) not in self.known:
            used = {
                name: self.versions[p][stage][self._met(k, stage)][name].clone().requires_grad_()
                for stage, names in enumerate(self.names)
                for name in names
            }
            x, y = self.batches[p][k]
            F.cross_entropy(functional_call(self.model, used, (x,)), y).backward()  # type: ignore[no-untyped-call]
            self.known[p, k] = {name: leaf.grad for name, leaf in used.items() if leaf.grad is not None}
        return self.known[p, k]

    def _update(self, members: Sequence[int], stage: int, *, gradients: bool) -> None:
        found = {p: self._gradients(p, len(self.versions[p][stage]) - 1) for p in members}
        stepped: dict[int, Weights] = {p: {} for p in members}
        for name in self.names[stage]:
            mean = torch.stack([found[p][name] for p in members]).mean(0)
            for p in members:
                weights, before = self.versions[p][stage][-1][name], self.momenta[p].get(name)
                gradient = (mean if gradients else found[p][name]) + DECAY * weights
                self.momenta[p][name] = gradient if before is None else MOMENTUM * before + gradient
                stepped[p][name] = weights - RATE * self.momenta[p][name]
            if not gradients:
                together = torch.stack([stepped[p][name] for p in members]).mean(0)
                for p in members:
                    stepped[p][name] = together
        for p in members:
            self.versions[p][stage].append(stepped[p])
