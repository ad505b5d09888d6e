"""Ends waits in torch.distributed that nothing else would end. peer faults -> *interruption* -> gloo.

gloo cannot be told to give up a wait; a wait that runs into its own timeout, however, makes it close all connections of
the group, upon which everything else that waits there raises at once. So a receive that nobody answers is asked for,
with a timeout of a millisecond. Groups of other backends are left alone.
"""

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

UNUSED_TAG = (1 << 31) - 1
AT_ONCE = timedelta(milliseconds=1)
_MARKS = (
    "gloo",
    "Application timeout caused pair closure",
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting",
    "Operation timed out",
    "Broken pipe",
)
_LATE = ("timed out", "timeout", "timing out")  # gloo's messages and collectives, the store's, NCCL's


interrupted_with_the_others: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Groups that torch.distributed does not know of; each has `interrupt`."""


def interrupt_groups() -> None:
    """Every wait of this process in a gloo group raises, now and from now on. May be called by any thread."""
    for known in list(interrupted_with_the_others):
        known.interrupt()
    if not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(ValueError, KeyError):  # the main thread may be giving it back at this moment
            if dist.get_backend(group) == dist.Backend.GLOO:
                interrupt_group(group)


def interrupt_group(group: Any) -> None:
    """Every wait of this process in the gloo group raises, and those of other ranks that wait for this one."""
    me = dist.get_rank()
    for peer in dist.get_process_group_ranks(group):
        if peer == me:
            continue
        try:
            work = dist.irecv(torch.empty(1), peer, group=group, tag=UNUSED_TAG)
            if work is not None:
                work.wait(AT_ONCE)
        except (RuntimeError, ValueError) as error:
            if "closed by peer" not in str(error):  # by this peer alone: what waits for others still waits
                return


def is_about_peers(error: BaseException) -> bool:
    """Whether an error, or what it came of, is a connection's: a consequence of what happened elsewhere."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and any(mark in str(seen) for mark in _MARKS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def ran_out_of_time(error: BaseException) -> bool:
    """Whether it was a wait that took too long, and not a connection that broke."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and any(word in str(seen).lower() for word in _LATE):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
