"""What moves tensors between ranks."""

from pl_pipe.comm.distributed import DistributedTransport
from pl_pipe.comm.local import LocalNetwork, LocalTransport
from pl_pipe.comm.transport import CommunicationError, Direction, Message, Transport
from pl_pipe.comm.wire import WIRE_DTYPES, Wire

__all__ = [
    "WIRE_DTYPES",
    "CommunicationError",
    "Direction",
    "DistributedTransport",
    "LocalNetwork",
    "LocalTransport",
    "Message",
    "Transport",
    "Wire",
]
