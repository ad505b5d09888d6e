"""How often a worker meets others: after every so many updates of its own. rules -> *Pace*.

    every=3    update update update │ meet │ update update update │ meet │ update │ the epoch ends: all meet
                 1      2      3               1      2      3              1       and count anew

Whoever has fewer updates left than that takes them alone: the end of an epoch brings them to the others.
"""

from pl_pipe.comm.synchronizers.port import Rule, Worker
from pl_pipe.errors import ConfigError


def check_every(every: int) -> None:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every={every!r}; give the number of updates after which workers average, 1 or more")


class Pace:
    """Counts one worker's updates."""

    def __init__(self, every: int = 1) -> None:
        check_every(every)
        self.every = every
        self.done = 0
        """Updates since the last meeting."""

    @property
    def is_last(self) -> bool:
        """Whether the update that comes next is the last before a meeting."""
        return self.done == self.every - 1

    def updated(self) -> bool:
        """Counts an update; whether workers meet after it."""
        self.done = (self.done + 1) % self.every
        return self.done == 0

    def restart(self) -> None:
        """All have met."""
        self.done = 0


class PacedRule(Rule):
    """A synchronizer whose workers need not meet after every update."""

    def __init__(self, worker: Worker, *, every: int = 1) -> None:
        super().__init__(worker)
        self._pace = Pace(every)

    def resume(self) -> None:
        self._pace.restart()
