"""What one rank does of a schedule, and where it waits for other replicas of its stage. plan -> *this* -> executor."""

from dataclasses import dataclass

from pl_pipe.schedule import FLUSHING, Reading


@dataclass(frozen=True)
class ExecutorSettings:
    """One rank's part of a schedule."""

    schedule: str
    warmup: int
    update_every: int
    """Mini-batches that share an update."""
    reading: Reading
    versioned: bool
    """Whether an update may come between a mini-batch's forward and its backward, or a forward reads older weights, or
    an update's mini-batches come with several calls of `advance`, between which Lightning clears gradients."""
    place: int = 0
    """Of this rank among the replicas of its stage: it has every mini-batch k with k mod replicas = place."""
    replicas: int = 1
    averaged: int = 1
    """Mini-batches of whose gradients an update takes the mean; beyond that they add up by their shares."""

    def all_complete(self, ordinal: int) -> int:
        """The mini-batch with whose arrival all replicas have run theirs of an update.

        None waits for the others before that: a rank must never need, for what it does with one mini-batch, what
        another does with a later one, or they would wait for each other as soon as anything else brings them together
        in between (a callback that broadcasts).
        """
        last = (ordinal + 1) * self.update_every - 1
        return last if self.schedule in FLUSHING else last + self.warmup * self.replicas

    def ends_update(self, number: int) -> bool:
        """Whether no later mini-batch of this rank shares the update."""
        return (number + self.replicas) // self.update_every != number // self.update_every
