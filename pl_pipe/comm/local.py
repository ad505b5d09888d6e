"""Ranks as threads of one process: the transport's double, for tests and trials."""

import queue
import threading

from torch import Tensor

from pl_pipe.comm.transport import CommunicationError, Message
from pl_pipe.tensors.ghosts import TensorSpec


class LocalNetwork:
    """Boxes that all ranks share, one for each message."""

    def __init__(self, *, timeout_s: float = 20.0) -> None:
        self.timeout_s = timeout_s
        self.sent = 0
        self.sent_bytes = 0
        self._boxes: dict[Message, queue.Queue[Tensor]] = {}
        self._lock = threading.Lock()

    def transport(self) -> "LocalTransport":
        return LocalTransport(self)

    def box(self, message: Message) -> "queue.Queue[Tensor]":
        with self._lock:
            return self._boxes.setdefault(message, queue.Queue())

    def emptied(self, message: Message) -> None:
        with self._lock:
            del self._boxes[message]

    def unread(self) -> list[Message]:
        """Messages that were sent or announced and never received."""
        with self._lock:
            return list(self._boxes)


class LocalTransport:
    """One rank's end of a LocalNetwork."""

    in_order = False

    def __init__(self, network: LocalNetwork) -> None:
        self._network = network
        self._expected: dict[Message, TensorSpec] = {}
        self.expected = 0

    def send(self, message: Message, tensor: Tensor, *, perhaps: bool = False) -> None:  # noqa: ARG002
        self._network.sent += 1
        self._network.sent_bytes += tensor.numel() * tensor.element_size()
        self._network.box(message).put(tensor.detach().contiguous().clone())

    def expect(self, message: Message, spec: TensorSpec) -> None:
        self._network.box(message)
        self._expected[message] = spec
        self.expected += 1

    def receive(self, message: Message, spec: TensorSpec) -> Tensor:
        announced = self._expected.pop(message, spec)
        if (announced.shape, announced.dtype) != (spec.shape, spec.dtype):
            raise CommunicationError(f"{message} was announced as {announced} and is received as {spec}")
        try:
            tensor = self._network.box(message).get(timeout=self._network.timeout_s)
        except queue.Empty:
            raise CommunicationError(
                f"stage {message.target} waited {self._network.timeout_s:g} s for {message} ({spec}), which never came"
            ) from None
        self._network.emptied(message)
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise CommunicationError(f"{message} should be {spec}, but {TensorSpec.of(tensor)} came")
        return tensor

    def flush(self, *, before: int | None = None) -> None:
        """Nothing is ever under way."""
