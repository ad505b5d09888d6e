"""What a policy notes of a training for its picture. policies -> *steps* -> adaptation_chart."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchedStep:
    """One step, as it was noticed."""

    step: int
    seconds: float
    """Since the step before; trials and a validation between the two are in it."""
    votes: int
    """Ranks that say that their links are slow."""


@dataclass(frozen=True)
class Switch:
    step: int
    text: str
    """Such as `star -> ring`."""
