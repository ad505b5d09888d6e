"""The port through which stages exchange activations and gradients. exchange -> *Transport* -> other ranks."""

from enum import Enum
from typing import NamedTuple, Protocol

from torch import Tensor

from pl_pipe.errors import StageError
from pl_pipe.tensors.ghosts import TensorSpec


class CommunicationError(StageError):
    """A message between stages that did not come, or not as announced."""


class Direction(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Message(NamedTuple):
    """Names one tensor on its way. Both ends count alike, so that nothing but the tensor itself has to travel."""

    source: int
    target: int
    batch: int
    number: int
    """Of the transfers between these two stages in this batch; a gradient has the number of what it belongs to."""
    direction: Direction
    exact: bool = False
    """Never rounded to the wire's dtype, and neither is its gradient."""
    place: int = 0
    """Of a hook's, of which not all ranks run the same lines: a number for those that ask."""

    def __str__(self) -> str:
        what = "transfer" if self.direction is Direction.FORWARD else "gradient"
        return f"{what} {self.number} of batch {self.batch} from stage {self.source} to stage {self.target}"


class Transport(Protocol):
    """One rank's end. Sending never waits for the receiver; contents travel in logical order, strides do not."""

    @property
    def in_order(self) -> bool:
        """Whether what one rank sends another in one direction must be sent in the order in which it is received."""

    def send(self, message: Message, tensor: Tensor, *, perhaps: bool = False) -> None:
        """The tensor may be changed or freed as soon as this returns; `perhaps` nobody will receive it."""

    def expect(self, message: Message, spec: TensorSpec) -> None:
        """The message will come: its receive may start now. Announcing is optional and binds to receiving it."""

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        """Waits for the message; raises CommunicationError when it does not come."""

    def flush(self, *, before: int | None = None) -> None:
        """Waits until all that was sent has left, or all of the batches with a number less than `before`."""
