"""Numbers the steps of a run, alike on all ranks. executor, evaluation -> *numbers* -> messages and turns.

A stage with r replicas gives step n to replica n mod r, so a number also says who runs the step on each stage.
"""

_HOOKS = 1 << 17  # above the numbers of all batches that are ever in flight at once, as messages are told apart


class StepNumbers:
    """Counts mini-batches of training and batches of evaluation, all in one row."""

    def __init__(self, *, round_size: int = 1, reporters: int = 1) -> None:
        """
        Args:
            round_size: mini-batches after which every replica of every stage has had equally many.
            reporters: replicas of the last stage.
        """
        self._round = round_size
        self._reporters = reporters
        self._next = self._hooks = 0

    @property
    def next(self) -> int:
        return self._next

    def begin_round(self) -> None:
        """The next number is the turn of every stage's first replica."""
        self._next = _next_multiple(self._next, self._round)

    def trained(self) -> int:
        return self._take()

    def evaluated(self) -> int:
        """A turn of the last stage's first replica, which has the metrics; the other stages' replicas alternate."""
        self._next = _next_multiple(self._next, self._reporters)
        return self._take()

    def hooked(self) -> int:
        """Of a hook, which may come between the batches of a round: a turn of every stage's first replica."""
        self._hooks = (self._hooks + 1) % (_HOOKS // self._round)
        return (_HOOKS // self._round + self._hooks) * self._round

    def _take(self) -> int:
        number = self._next
        self._next += 1
        return number


def _next_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
