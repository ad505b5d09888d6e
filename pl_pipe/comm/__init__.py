"""What moves tensors between ranks."""

from pl_pipe.comm.distributed import DistributedTransport
from pl_pipe.comm.listening import MessageListener
from pl_pipe.comm.local import LocalNetwork, LocalTransport
from pl_pipe.comm.objects import ObjectChannel
from pl_pipe.comm.outbox import Outbox
from pl_pipe.comm.outlines import OutlineChannel
from pl_pipe.comm.summing import DistributedSumming, LocalSums, Pending, Summing
from pl_pipe.comm.transport import CommunicationError, Direction, Message, Transport
from pl_pipe.comm.waiting import Wait, read_as, wait_for
from pl_pipe.comm.wire import WIRE_DTYPES, Wire

__all__ = [
    "WIRE_DTYPES",
    "CommunicationError",
    "Direction",
    "DistributedSumming",
    "DistributedTransport",
    "LocalNetwork",
    "LocalSums",
    "LocalTransport",
    "Message",
    "MessageListener",
    "ObjectChannel",
    "Outbox",
    "OutlineChannel",
    "Pending",
    "Summing",
    "Transport",
    "Wait",
    "Wire",
    "read_as",
    "wait_for",
]
