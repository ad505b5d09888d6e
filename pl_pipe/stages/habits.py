"""What batches of one signature are known to do, so that their receives can be posted ahead. Pipe -> *this*."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pl_pipe.comm import Message
from pl_pipe.tensors.ghosts import TensorSpec
from pl_pipe.tensors.ghosts.specs import hashable, scan

_REMEMBERED = 256  # signatures; beyond that, batches are too different to learn from


@dataclass
class Habit:
    """What the steps of one signature did on this rank, and whether they always do."""

    arrivals: list[tuple[Message, TensorSpec]] = field(default_factory=list)
    actions: int = -1
    repeated: bool = False
    has_loss: bool = False
    recomputed: bool = False
    """A step was run again, and did the same."""

    def note(self, arrivals: list[tuple[Message, TensorSpec]], actions: int, *, fixed: bool) -> None:
        alike = [(message._replace(batch=0), spec) for message, spec in arrivals]
        self.repeated = fixed and alike == self.arrivals and actions == self.actions
        self.arrivals, self.actions = alike, actions


class Habits:
    """The habits of one rank's steps, by what tells steps apart."""

    def __init__(self) -> None:
        self._known: dict[Any, Habit] = {}

    def of(self, batch: Any, state: int, modes: Any) -> Habit:
        """That of steps on batches shaped like this one, with the model in this state; a new one if none is known."""
        looks = signature_of(batch)
        key = (looks, state, modes)
        if batch is None or looks is None or not hashable(key):
            return Habit()
        if len(self._known) >= _REMEMBERED and key not in self._known:
            self._known.clear()
        return self._known.setdefault(key, Habit())


def signature_of(batch: Any) -> Any:
    """Equal for batches that look alike; None where nobody can tell."""
    tensors: list[Tensor] = []
    structure = _without_texts(scan(batch, tensors))
    if structure is None:
        return None
    found = structure, tuple(TensorSpec.of(tensor) for tensor in tensors)
    return found if hashable(found) else None


def _without_texts(structure: Any) -> Any:
    """The structure of a batch without its texts and floats, which differ from batch to batch and change no shape.

    None where it holds an object that is no container: nobody knows what such a thing does.
    """
    if isinstance(structure, tuple):
        if len(structure) == 2 and structure[0] in (str, bytes, float, type(None)):
            return structure[0]
        parts = tuple(_without_texts(part) for part in structure)
        return None if None in parts else parts
    return structure if isinstance(structure, str | int | type) else None
