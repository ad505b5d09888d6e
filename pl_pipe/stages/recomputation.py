"""A step that runs again for its backward, so that its activations need not wait for it. Pipe -> *repetition* -> Pipe.

forward    the step as ever; then its graph goes, and what stays is
           what came from other stages, the batch, the random state, and what of the model the step changed
…          other batches
backward   the step again: what came is here already, nothing is sent; and then backward through the new graph
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from pl_pipe.comm import Message, Transport
from pl_pipe.errors import StageError
from pl_pipe.profiling.preserve import RandomState
from pl_pipe.stages.exchange import BatchExchange
from pl_pipe.stages.model_memory import ModelMemory, Place
from pl_pipe.tensors.ghosts import TensorSpec, value_of
from pl_pipe.tensors.lineage import storage_key, version
from pl_pipe.tensors.trees import tensors_in

_TOLERANCE = 1e-3  # of the largest number; a GPU's sums may come in another order

_REMEDY = (
    "so it depends on something that changed in between (a counter, trainer.global_step, a generator of its own); pass "
    "such things in the batch, or set recompute=false"
)


@dataclass
class Copying:
    """What steps were seen to change in place, and must be copied before them."""

    inputs: bool = False
    places: set[Place] = field(default_factory=set)


class StepMemory:
    """What a step needs to run again."""

    def __init__(
        self, modules: Iterable[nn.Module], batch: Any, copying: Copying, *, model_state: int, is_first: bool
    ) -> None:
        """Of the `first` step of its kind what is sent is kept too, to be compared with what the repetition sends."""
        self.arrivals: list[Tensor] = []
        self.departures: list[Tensor] | None = [] if is_first else None
        self.model_state = model_state
        self._copying = copying
        self._copies_inputs = copying.inputs or is_first
        self._shared: list[tuple[Tensor, int]] = []
        """What the step works with in the memory of arrivals, and its versions."""
        self._batch = [(tensor, version(tensor)) for tensor in tensors_in(batch)]
        self._random = RandomState()
        self._model = ModelMemory(modules, copying.places, learn=is_first)

    def came(self, arrival: Tensor, entered: Tensor) -> None:
        shared = storage_key(arrival) == storage_key(entered)
        self.arrivals.append(arrival.detach().clone() if shared and self._copies_inputs else arrival)
        if shared:
            self._shared.append((entered, version(entered)))

    def went(self, tensor: Tensor) -> None:
        if self.departures is not None:
            self.departures.append(tensor.clone())

    def suffices(self) -> bool:
        """To be called after the step. False where it changed in place what it would have to begin with.

        The step's graph has to be kept then; of the next ones there will be copies, except of batches, which are not
        ours to exchange.
        """
        shared, self._shared = self._shared, []
        changed = any(version(tensor) != before for tensor, before in shared)
        intact = self._copies_inputs or not changed
        self._copying.inputs = self._copying.inputs or changed
        return self._model.note_changes() and intact and self._batch_is_intact()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Model and random numbers are as they were when the step began, until the block ends."""
        if not self._batch_is_intact():
            raise StageError(
                "the tensors of a batch were changed between its forward and its backward, which has to begin with "
                "them again; change copies of them, or set recompute=false"
            )
        now = RandomState()
        try:
            self._random.restore()
            with self._model.put_back():
                yield
        finally:
            now.restore()

    def _batch_is_intact(self) -> bool:
        return all(version(tensor) == before and value_of(tensor) is None for tensor, before in self._batch)


class RepeatedExchange(BatchExchange):
    """The transfers of a step that runs again: what came is here, and what would be sent was."""

    def __init__(self, transport: Transport, *, memory: StepMemory, **settings: Any) -> None:
        super().__init__(transport, **settings)
        self._arrivals = iter(memory.arrivals)
        self._departures = None if memory.departures is None else iter(memory.departures)

    def _fetch(self, message: Message, spec: TensorSpec) -> Tensor:
        arrival = next(self._arrivals, None)
        if arrival is None or tuple(arrival.shape) != spec.shape:
            found = "nothing" if arrival is None else str(TensorSpec.of(arrival))
            raise StageError(
                f"run again for its backward, the step asked for {message} ({spec}), and not, as at first, "
                f"for {found}, {_REMEDY}"
            )
        return arrival

    def _dispatch(self, message: Message, tensor: Tensor) -> None:
        if self._departures is None:
            return
        sent = next(self._departures, None)
        if sent is None or not _alike(sent, tensor):
            raise StageError(
                f"run again for its backward, the step gave other numbers for {message} than at first, {_REMEDY}"
            )

    @override
    def backward(self, loss: Tensor | None) -> None:
        super().backward(loss)
        self._arrivals, self._departures = iter(()), None

    @override
    def _await_answer(self, sent: Any) -> None:
        """The first run has announced it."""


def _alike(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point() or first.numel() == 0:
        return torch.equal(first, second)
    largest = float(first.abs().max())
    return torch.allclose(first, second, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
