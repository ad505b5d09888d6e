"""What the variants' steps compute of the batch alone, once for all of them. parts, batch -> *shared part* -> tensors.

It runs before the variants' streams part; they read its results, which stay until the next step.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor, fx

from pl_pipe.fusion.replay import Traced, compiled, divided


class Sharer(Protocol):
    """A variant's own part."""

    traced: Traced | None

    @property
    def batch_places(self) -> Sequence[int]:
        """Among the arguments of what was traced, those that are every variant's."""

    def share(self, shared: "SharedPart", rest: fx.GraphModule) -> None:
        """From now on it computes the rest."""


class SharedPart:
    def __init__(self, run: Callable[..., Sequence[Tensor]], batch: Sequence[Tensor], operations: int) -> None:
        self._run = run
        self._batch = batch
        self.operations = operations
        """How many each variant need not compute."""
        self.results: list[Tensor] = []

    @classmethod
    def of(cls, parts: Sequence[Sharer], batch: Sequence[Tensor], *, compiles: bool) -> Self | None:
        """For parts that are prepared, and from now on compute the rest. None if they do not have the same operations,
        or none of the batch alone."""
        first = parts[0].traced
        assert first is not None
        if len(parts) == 1 or any(part.traced is None or part.traced.graph is not first.graph for part in parts):
            return None
        found = divided(first.graph, parts[0].batch_places)
        if found is None:
            return None
        shared = cls(compiled(found.once, batch, trains=False) if compiles else found.once, batch, found.count)
        if compiles:
            shared.compute()  # the compiler is shown what the rest is given
        for part in parts:
            part.share(shared, found.each)
        return shared

    def compute(self) -> None:
        self.results = []  # the last step's
        with torch.no_grad():
            self.results = [tensor.detach() for tensor in self._run(*self._batch)]
