"""A batch on its way through one rank: Pipe -> *PipeStep* -> the user's step, its backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pl_pipe.stages.exchange import BatchExchange
from pl_pipe.stages.habits import Habit
from pl_pipe.tensors.ghosts import GhostStep, LeaveStep, TensorSpec, value_of
from pl_pipe.tensors.interception import taken_off

IDLE = -1
"""The stage of a rank that owns nothing: it runs every step for its Python alone, and has no part in any transfer."""


Run: TypeAlias = Callable[[Any], Tensor | None]
"""The user's step, given the PipeStep; returns the loss."""
RunAgain: TypeAlias = Callable[[], "tuple[PipeStep, Tensor | None]"]


class PipeStep:
    """A batch on its way: from the step's begin to its backward."""

    def __init__(
        self, ghosts: GhostStep, exchange: BatchExchange, habit: Habit, *, is_repetition: bool = False
    ) -> None:
        self.is_repetition = is_repetition
        """The step runs again for its backward; what it logs has been heard."""
        self.out_of_turn = ghosts.stage == IDLE
        """This rank has no part in the batch."""
        self.seed: int | None = ghosts.seed
        """For random numbers that all ranks must draw alike."""
        self.left = False
        """This rank left the user's step before its end, having nothing left to do in it."""
        self._ghosts = ghosts
        self._exchange = exchange
        self._habit = habit
        self._forget: Callable[[Run], RunAgain | None] = lambda _: None
        self._run_again: RunAgain | None = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the block the calling thread is in the step once more, which has ended."""
        with self._ghosts:
            yield

    def end(self) -> None:
        """Lets go of the step's graph."""
        self._exchange.forget()
        self._ghosts.release()

    def forget(self, run: Run) -> bool:
        """Lets go of what `run`, the user's step, can compute again for backward; false where it must be kept."""
        self._run_again, self._forget = self._forget(run), lambda _: None
        if self._run_again is not None:
            self._exchange.forget()
            self._ghosts.release()
        return self._run_again is not None

    def bring(self, tensor: Tensor) -> Tensor:
        """Has the tensor's numbers sent to the last stage, where this returns them; elsewhere it returns a ghost.

        For what is to be shown to people: no gradient comes back. Every rank must ask, at the same place in the step.
        """
        detached = tensor.detach()
        with taken_off(self._ghosts):
            value = self._ghosts.value(detached)
            if value is not None:
                self._ghosts.move(detached, value, self._ghosts.stages - 1, exact=True)
            return self._ghosts.here(detached)

    def alone(self) -> AbstractContextManager[Any]:
        """Within it, operations are this rank's own, and nobody else's."""
        return taken_off(self._ghosts)

    def at_last(self, tensor: Tensor) -> Tensor:
        """The tensor as a value of the last stage: itself where it is computed there, and otherwise brought there."""
        ghosts, last = self._ghosts, self._ghosts.stages - 1
        with taken_off(ghosts):
            value = ghosts.value(tensor)
            if ghosts.is_absent(tensor, value):
                return ghosts.new_ghost(TensorSpec.of(tensor), last)
        if value is None or value.home == last:
            return tensor
        brought = self.bring(tensor)
        with taken_off(ghosts):
            brought = brought.detach()
            return (
                ghosts.show(brought, last) if ghosts.stage == last else ghosts.new_ghost(TensorSpec.of(brought), last)
            )

    def of_last(self, call: Callable[[], Any], names: Iterable[str] | None = None) -> Any:
        """What a call returns that computes on values of the last stage, and that no other rank needs.

        A rank without the batch takes part in it with ghosts; where numbers are read, it skips the rest. So does every
        earlier rank where it would otherwise wait for the numbers. With `names` it is a dictionary.
        """
        ghosts = self._ghosts
        if ghosts.batch_is_here and not ghosts.both_ways:
            return call()
        read_up_to, both_ways = ghosts.read_up_to, ghosts.both_ways
        ghosts.both_ways = False
        try:
            return call()
        except LeaveStep:
            spec, last = TensorSpec((), (), torch.get_default_dtype(), False), ghosts.stages - 1
            return (
                ghosts.new_ghost(spec, last)
                if names is None
                else {name: ghosts.new_ghost(spec, last) for name in names}
            )
        finally:
            ghosts.read_up_to, ghosts.both_ways = read_up_to, both_ways

    def backward(self, loss: Tensor | None = None) -> None:
        """This rank's part of the batch's backward. `loss` is what the step returned: None, or a ghost, elsewhere."""
        if self._run_again is not None:
            run_again, self._run_again = self._run_again, None
            step, loss = run_again()
            del run_again  # and with it what the step began with
            step.backward(loss)
            return
        value = None if loss is None else value_of(loss)
        is_root = value is not None and value.home == self._ghosts.stage and loss is not None and loss.requires_grad
        if is_root:
            self._habit.has_loss = True
        self._exchange.backward(loss if is_root else None)
        self._ghosts.release()
