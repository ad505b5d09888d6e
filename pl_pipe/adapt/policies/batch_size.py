"""How large a batch is worth it, and the learning rate that goes with it. noise scale -> *rule* -> batch policy.

Below the noise scale a batch twice as large makes almost twice the progress a step; above it, hardly more. So the batch
follows the noise scale, which grows as the loss falls, within limits and by no more than a factor at a time.
"""

import math
from dataclasses import dataclass

from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.errors import ConfigError

RATES = ("none", "linear", "sqrt", "adascale")


@dataclass(frozen=True)
class BatchSizeRule:
    """Sizes are global: of all ranks together."""

    least: int = 1
    most: int = 4096
    at_once: float = 2.0
    """The factor by which it may grow, or shrink, at a time."""
    margin: float = 1.25
    """The factor by which the wanted size must differ for anything to change."""
    shrinks: bool = False
    rate: str = "adascale"
    """What becomes of the learning rate, when the batch grows by a factor s: `linear` s, `sqrt` √s, `adascale` the gain
    that AdaScale expects of the noise, between 1 and s; `none` leaves it."""

    def __post_init__(self) -> None:
        check_whole(least=self.least, most=self.most)
        check_numbers(at_once=self.at_once, margin=self.margin)
        if not isinstance(self.shrinks, bool):
            raise ConfigError(f"shrinks={self.shrinks!r}; give true or false")
        if not 1 <= self.least <= self.most:
            raise ConfigError(
                f"least={self.least} and most={self.most} contradict each other; choose 1 <= least <= most"
            )
        if self.at_once <= 1 or self.margin < 1:
            raise ConfigError(
                f"at_once={self.at_once} must be more than 1 and margin={self.margin} at least 1: they are factors"
            )
        if self.at_once < self.margin:
            raise ConfigError(
                f"at_once={self.at_once} is below margin={self.margin}, so that the batch would never change; choose "
                f"margin <= at_once"
            )
        if self.rate not in RATES:
            raise ConfigError(f"rate={self.rate} is unknown; choose one of {', '.join(RATES)}")

    def size(self, present: int, noise_scale: float, *, multiple: int, samples: int | None = None) -> int:
        """The size to go on with: the present one if there is no reason for another.

        Args:
            multiple: what sizes must be multiples of, such as the number of ranks.
            samples: of an epoch; there is no larger batch.
        """
        if not math.isfinite(noise_scale):
            return present
        most = self.most if samples is None else min(self.most, samples)
        wanted = min(max(noise_scale, present / self.at_once), present * self.at_once)
        wanted = min(max(wanted, self.least), most)
        if not self.shrinks:
            wanted = max(wanted, present)
        found = max(1, int(wanted / multiple)) * multiple
        found += multiple if found < self.least else 0
        differs = found >= present * self.margin or found <= present / self.margin
        return found if differs and self.least <= found <= most else present

    def rate_factor(self, before: int, after: int, noise_scale: float) -> float:
        """What to multiply the learning rate by."""
        growth = after / before
        if self.rate == "linear":
            return growth
        if self.rate == "sqrt":
            return math.sqrt(growth)
        if self.rate == "adascale" and math.isfinite(noise_scale):
            return (noise_scale / before + 1) / (noise_scale / after + 1)
        return 1.0
