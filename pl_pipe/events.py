"""One record of something that took time, whether simulated or measured. simulate, runtime -> *events* -> report."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank, or the link out of it, did from `start_s` to `end_s`."""

    rank: int
    kind: str
    """`forward`, `backward`, `update`, `send` or `all_reduce`."""
    start_s: float
    end_s: float
    batch: int
    stage: int
    peer: int | None = None
    """The receiving rank of a `send`."""
    size_bytes: int = 0

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s
