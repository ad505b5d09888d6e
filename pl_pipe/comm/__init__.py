"""What moves tensors between ranks."""

from pl_pipe.comm.distributed import DistributedTransport
from pl_pipe.comm.listening import MessageListener
from pl_pipe.comm.local import LocalNetwork, LocalTransport
from pl_pipe.comm.transport import CommunicationError, Direction, Message, Transport

__all__ = [
    "CommunicationError",
    "Direction",
    "DistributedTransport",
    "LocalNetwork",
    "LocalTransport",
    "Message",
    "MessageListener",
    "Transport",
]
