"""What a signal means once all ranks have agreed to serve it. agreement -> *serve_signal* -> the trainer's loop."""

import signal
from collections.abc import Callable
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.utilities.exceptions import SIGTERMException

from pl_pipe.log import get_logger

log = get_logger(__name__)

INTERRUPT = "interrupt"
SIGNALS = ("requeue", "sigterm", INTERRUPT)
"""In the order in which they are served where several have come."""


class Leaving(Protocol):
    """A strategy that is told when its ranks leave together, and so wait for nobody."""

    leaves_together: bool


def serve_signal(
    kind: str, strategy: Leaving, trainer: L.Trainer, *, requeue: Callable[..., Any], rank: int, state: str
) -> None:
    """Queues the job again and returns, or ends the loop as Lightning would; the log then says in what `state`."""
    if kind == "requeue":
        requeue(signal.SIGUSR1, None)
        return
    strategy.leaves_together = True
    if kind == INTERRUPT:
        raise KeyboardInterrupt
    connector: Any = trainer._signal_connector
    connector.received_sigterm = True
    log.info("rank %d ends as SIGTERM asked it to; %s", rank, state)
    raise SIGTERMException
