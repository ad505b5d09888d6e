"""How far workers may be ahead of the slowest one. waves -> *WaveClocks* -> who may go on. HetPipe (ATC'20).

A worker's clock counts the waves whose updates it has handed in. It may begin the next one while its clock is at most
`distance` ahead of the least clock among the workers that take part.
"""

from collections.abc import Iterable

from pl_pipe.errors import ConfigError


def check_distance(distance: int) -> None:
    if not isinstance(distance, int) or distance < 0:
        raise ConfigError(f"distance={distance!r}; give a number of waves, 0 for none")


class WaveClocks:
    """A state machine; it is told of waves, and answers who no longer has to wait."""

    def __init__(self, workers: Iterable[int], *, distance: int) -> None:
        check_distance(distance)
        self.distance = distance
        self.clocks = dict.fromkeys(workers, 0)
        """Of the workers that take part."""
        self.waiting: set[int] = set()
        """Workers that are too far ahead."""

    @property
    def least(self) -> int:
        return min(self.clocks.values(), default=0)

    def tick(self, worker: int) -> list[int]:
        """The worker has handed in a wave, and waits; the answer is who may go on now."""
        assert worker not in self.waiting, f"worker {worker} waits already"
        self.clocks[worker] += 1
        self.waiting.add(worker)
        return self._released()

    def leave(self, worker: int) -> list[int]:
        """The worker hands in no more; nobody waits for it."""
        self.clocks.pop(worker, None)
        self.waiting.discard(worker)
        return self._released()

    def join(self, worker: int) -> None:
        """Takes part (again), as far as the slowest."""
        self.clocks.setdefault(worker, self.least)

    def reunited(self, workers: Iterable[int]) -> None:
        """These have met, and go on from one clock. All of them count from now on, also those that are long in coming
        to their next wave: nobody is to run ahead of them meanwhile."""
        assert not self.waiting, f"{self.waiting} wait, and were to meet"
        self.clocks = dict.fromkeys(workers, 0)

    def _released(self) -> list[int]:
        allowed = self.least + self.distance
        free = sorted(worker for worker in self.waiting if self.clocks[worker] <= allowed)
        self.waiting.difference_update(free)
        return free
