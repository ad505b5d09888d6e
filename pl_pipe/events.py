"""One record of something that took time, whether simulated or measured. simulate, runtime -> *events* -> report."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank, or the link out of it, did from `start_s` to `end_s`."""

    rank: int
    kind: str
    """`forward`, `backward`, `update`, `send`, `all_reduce`, or `receive`: a wait for a message, measured runs only.

    A measured forward or backward holds its waits; a simulated one begins after them."""
    start_s: float
    end_s: float
    batch: int
    stage: int
    peer: int | None = None
    """The receiving rank of a `send`, the sending one of a `receive`."""
    size_bytes: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s
