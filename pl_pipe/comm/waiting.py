"""Waits for another rank, and what is said when they fail. channels, transport, sums -> *waiting* -> torch.distributed.

A wait ends in one of three ways: what was waited for is there; the time is up; or the connection is closed, because the
other rank has ended, or because this process gave the wait up (`pl_pipe.comm.interruption`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from pl_pipe.comm.interruption import is_about_peers, ran_out_of_time
from pl_pipe.comm.transport import CommunicationError


class Wait(NamedTuple):
    """Who waits for what, in words; they are asked for when the wait has failed, so that others cost nothing."""

    who: str
    what: str
    peers: Sequence[int]
    """The ranks it must come from."""
    remedy: str = ""
    """What else to do than to look at them."""


def wait_for(work: Any, describe: Callable[[], Wait], *, timeout_s: float) -> None:
    """Waits for what torch.distributed has begun; raises CommunicationError when it does not come.

    All waits go through this file also because a rank that stands here is known to wait for others, and not to be the
    one that holds them up.
    """
    with read_as(describe, timeout_s=timeout_s):
        work.wait(timedelta(seconds=timeout_s))


@contextmanager
def read_as(describe: Callable[[], Wait], *, timeout_s: float) -> Iterator[None]:
    """An error of torch.distributed within the block becomes one that can be read. What starts a wait belongs into such
    a block too: where the connection is closed already, that fails."""
    try:
        yield
    except RuntimeError as error:
        if not is_about_peers(error):
            raise  # this rank's own: a dtype that the backend does not carry, no memory left
        raise CommunicationError(_words(describe(), error, timeout_s)) from error


def _words(wait: Wait, error: RuntimeError, timeout_s: float) -> str:
    given_up = "Application timeout" in str(error)  # of another wait, upon which gloo closed the group's connections
    late = ran_out_of_time(error) and not given_up
    why = f"did not come within {timeout_s:g} s" if late else "cannot come: the connection is closed"
    peers = ", ".join(map(str, wait.peers))
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return f"{wait.who} waited for {wait.what}, which {why}; look at rank {peers}{wait.remedy} ({first_line})"
