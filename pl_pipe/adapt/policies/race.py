"""Which topology has the shortest steps under traffic? seconds of steps -> *Race* -> topology policy.

Sums between two steps cost time, disturb the links that they try, and are over before connections have come to their
shares of a busy link. So rivals are used in turn, each for some steps of the training itself.

    star          clique        ring          clique
    ────── alarm ──────────────────────────── ─────────  the shortest step decides
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

STEPS_EACH = 2
"""The first one is often late, while connections come to their shares; the shorter one counts."""


@dataclass
class Race:
    names: Sequence[str]
    """The one that is used first comes first."""
    before_s: float
    """Of a step before."""
    must_save_s: float
    """Of a step, by whichever wins."""
    steps_s: dict[str, float] = field(default_factory=dict)
    """Of those whose turn is over."""
    _times_s: list[float] = field(default_factory=list)

    @property
    def runner(self) -> str | None:
        """Whose turn it is; nobody's in the end."""
        return self.names[len(self.steps_s)] if len(self.steps_s) < len(self.names) else None

    def observe(self, step_s: float) -> bool:
        """Whether this was the last step of somebody's turn."""
        assert self.runner is not None
        self._times_s.append(step_s)
        if len(self._times_s) < STEPS_EACH:
            return False
        self.steps_s[self.runner] = min(self._times_s)
        self._times_s = []
        return True

    @property
    def winner(self) -> str | None:
        """Whose steps were shortest, if they save enough."""
        best = min(self.steps_s, key=lambda name: (self.steps_s[name], name))
        return best if self.before_s - self.steps_s[best] >= self.must_save_s else None
