"""How long steps take. batches -> *StepPace* -> elastic policy.

Workers that come and go are started anew, so that a pace is always that of one number of workers.
"""

import statistics
import time
from collections import deque


class StepPace:
    """The median of the latest steps. An epoch's first step is not timed: what lies before it is no step."""

    def __init__(self, *, window: int, interval: int) -> None:
        """
        Args:
            window: steps whose median counts.
            interval: steps from one decision to the next, which the window is no longer than: else the first decision
                would wait for more steps than were to lie before it.
        """
        self._times_s: deque[float] = deque(maxlen=min(window, interval))
        self._least = max(1, min(window, interval) // 2)
        self._ended_s: float | None = None
        self._samples = self._step_samples = 0

    def add(self, samples: int) -> None:
        """A batch of the step that is being made."""
        self._samples += samples

    def end_step(self) -> None:
        now_s = time.perf_counter()
        if self._ended_s is not None:
            self._times_s.append((now_s - self._ended_s) / self._samples)
        self._ended_s, self._step_samples, self._samples = now_s, self._samples, 0

    def pause(self) -> None:
        """The epoch has ended."""
        self._ended_s = None

    @property
    def is_within_step(self) -> bool:
        """Batches have been accumulated, and more will be before the step is made."""
        return self._samples > 0

    @property
    def is_known(self) -> bool:
        """Whether at least half of the window has been timed: workers may have come shortly before a decision."""
        return len(self._times_s) >= self._least

    @property
    def sample_s(self) -> float:
        return statistics.median(self._times_s)

    @property
    def step_s(self) -> float | None:
        """None before the second step."""
        return self.sample_s * self._step_samples if self._times_s else None
