"""What goes into a pipeline and what comes out: MiniBatch -> executor, with a Stepper -> Update."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Step(Protocol):
    """A mini-batch between its forward and its backward."""

    def forget(self, run: Callable[[Any], Tensor | None]) -> bool:
        """May let go of what `run` can compute again; then backward needs no loss."""

    def backward(self, loss: Tensor | None = None) -> None: ...


class Stepper(Protocol):
    """What runs a mini-batch's step on this rank: a Pipe, or the whole model."""

    def step(
        self,
        number: int,
        batch: Any = None,
        *,
        parameters: Mapping[str, Tensor] | None = None,
        out_of_turn: bool = False,
    ) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True)
class MiniBatch:
    """What enters the pipeline at once."""

    content: Any
    """What its step is called with; shapes in it tell which mini-batches do the same."""
    run: Callable[[Any], Tensor | None]
    """Runs the user's step, given the PipeStep, and returns the loss (or its ghost) times its share in the update."""


@dataclass
class Update:
    """Gradients that are ready to be applied."""

    gradients: dict[str, Tensor]
    """By name; parameters that had no part in it are absent."""
    settings: Any
    """What `advance` was told after the first mini-batch that shares the update: the one that all replicas of a stage
    have met by then."""

    def added_to(self, earlier: Mapping[str, Tensor]) -> "Update":
        """With gradients that were there before it."""
        gradients = dict(earlier)
        for name, gradient in self.gradients.items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return Update(gradients, self.settings)
