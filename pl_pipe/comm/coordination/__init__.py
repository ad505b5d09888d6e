"""Rank 0 decides for uneven workers, and all workers meet there."""

from pl_pipe.comm.coordination.client import CoordinatorClient
from pl_pipe.comm.coordination.coordinator import Coordinator, Sets
from pl_pipe.comm.coordination.mailbox import LocalMailbox, Mailbox, StoreMailbox

__all__ = ["Coordinator", "CoordinatorClient", "LocalMailbox", "Mailbox", "Sets", "StoreMailbox"]
