"""Numbers that gradients tell, from their squared lengths alone. monitors -> *estimates* -> policies.

With g the gradient of b samples on one rank and ḡ the mean over n ranks, of B = n·b samples:

    mean |g|² = |G|² + S/b      |ḡ|² = |G|² + S/B      G the true gradient, S the trace of one sample's covariance

Two equations, two unknowns; S/|G|² is the noise scale: the batch size above which larger batches help less and less
(McCandlish et al. 2018). Both are averaged before they are divided, and averages begin without a bias towards zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.errors import ConfigError


@dataclass
class RunningMean:
    """An exponential average that forgets by `keep`, corrected for what it has not seen yet."""

    keep: float
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = self.keep * self.total + (1 - self.keep) * value
        self.weight = self.keep * self.weight + (1 - self.keep)

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@dataclass
class NoiseScale:
    """The gradient noise scale of a run, step by step."""

    keep: float = 0.95
    """Of the averages, from step to step."""
    warmup: int = 10
    """Steps before there is an answer."""
    seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_numbers(keep=self.keep)
        check_whole(warmup=self.warmup)
        if self.warmup < 0:
            raise ConfigError(f"warmup={self.warmup} is no number of measurements; choose 0 or more")
        if not 0 <= self.keep < 1:
            raise ConfigError(f"keep={self.keep} is no share of an average to keep; choose 0 <= keep < 1")
        self._signal, self._noise = RunningMean(self.keep), RunningMean(self.keep)

    def add(self, small_squared: float, large_squared: float, *, small: float, large: float) -> None:
        """
        Args:
            small_squared: the mean squared length of gradients of `small` samples.
            large_squared: the squared length of the gradient of all `large` samples, of which those are parts.
        """
        if not (math.isfinite(small_squared) and math.isfinite(large_squared)) or large <= small:
            return  # an overflow, or a batch too small to be divided
        self._signal.add((large * large_squared - small * small_squared) / (large - small))
        self._noise.add((small_squared - large_squared) / (1 / small - 1 / large))
        self.seen += 1

    def state(self) -> dict[str, Any]:
        means = {"signal": self._signal, "noise": self._noise}
        return {"seen": self.seen, **{name: [one.total, one.weight] for name, one in means.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        self.seen = int(state["seen"])
        for name, one in (("signal", self._signal), ("noise", self._noise)):
            one.total, one.weight = map(float, state[name])

    @property
    def signal(self) -> float:
        """|G|², the squared length of the true gradient."""
        return self._signal.value

    @property
    def noise(self) -> float:
        """S, the sum of the variances of one sample's gradient."""
        return self._noise.value

    @property
    def value(self) -> float:
        """In samples; NaN before the warm-up is over, and where noise hides the gradient altogether."""
        if self.seen < self.warmup or not self.signal > 0:
            return math.nan
        return max(0.0, self.noise / self.signal)
