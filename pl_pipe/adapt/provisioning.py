"""How many workers are worth it. throughput, or a schedule -> *rules* -> elastic policy. KungFu's provisioning rule.

One worker more is kept while it brings at least a share of what a worker should: with threshold 0.33 and m workers,
T(m) must reach (1 + 0.33/m) · T(m-1). Else the last one goes, and that is the number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.errors import ConfigError


@dataclass
class Provisioning:
    """Grows by one worker at a time until that is not worth it."""

    least: int = 1
    most: int = 4
    threshold: float = 0.33
    throughputs: dict[int, float] = field(default_factory=dict)
    """Samples a second, by number of workers."""
    settled: bool = False

    def __post_init__(self) -> None:
        check_whole(least=self.least, most=self.most)
        check_numbers(threshold=self.threshold)
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"least={self.least} and most={self.most} workers contradict each other; choose 1 <= least <= most"
            )
        if self.threshold < 0:
            raise ConfigError(f"threshold={self.threshold} must be 0 or more: it is the gain that a worker must bring")

    def workers(self, present: int, samples_per_s: float) -> int:
        """How many to go on with, after so much throughput with the present ones."""
        self.throughputs[present] = samples_per_s
        if self.settled:
            return present
        before = self.throughputs.get(present - 1)
        if before is not None and samples_per_s < (1 + self.threshold / present) * before:
            self.settled = True
            return max(self.least, present - 1)
        if present >= self.most:
            self.settled = True
            return self.most
        return max(self.least, present + 1)

    def state(self) -> dict[str, Any]:
        return {"throughputs": dict(self.throughputs), "settled": self.settled}

    def load(self, state: Mapping[str, Any]) -> None:
        self.throughputs = {int(workers): float(value) for workers, value in state["throughputs"].items()}
        self.settled = bool(state["settled"])


def parse_schedule(schedule: str | Sequence[str]) -> list[tuple[int, int]]:
    """`2:100,3:50`, or a list of such parts, is two workers for 100 steps, three for 50 and to the end."""
    text = schedule if isinstance(schedule, str) else ",".join(map(str, schedule))
    found = []
    for part in text.split(","):
        size, separator, steps = part.strip().partition(":")
        if not separator or not size.isdecimal() or not steps.isdecimal() or int(size) < 1 or int(steps) < 1:
            raise ConfigError(
                f"schedule={text!r} has the part {part.strip()!r}; write size:steps with numbers of 1 or more, such "
                f"as 2:100,3:50"
            )
        found.append((int(size), int(steps)))
    return found


def scheduled_workers(schedule: list[tuple[int, int]], step: int) -> int:
    """How many the schedule wants after so many steps."""
    for size, steps in schedule:
        if step < steps:
            return size
        step -= steps
    return schedule[-1][0]
