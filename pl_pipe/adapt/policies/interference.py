"""Is something else on the links? throughputs by rank -> *Interference* -> topology policy.

Each rank compares what its links give with what they gave in clean steps, and votes. A majority that lasts is an alarm.

    throughput   ▇▇▇▇▇▇▇▇▅▃▃▃      the median of the last steps: below `threshold` of the reference a rank begins to
    votes                  ··      vote, above `recovered` it ends; in steps in a row with more than half of them, votes
                                   are added up: `patience` times as many as ranks are an alarm

Traffic takes its share of one direction: what a rank receives and what it sends are two series.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pl_pipe.checks import check_numbers, check_whole
from pl_pipe.errors import ConfigError

_MOMENT = 4
"""Steps."""
_FAR_OFF = 1.5


@dataclass(frozen=True)
class InterferenceSettings:
    """When links count as disturbed."""

    window: int = 10
    """Clean steps whose median is the reference."""
    warmup: int = 3
    """Steps after the beginning, or after a switch, that are not looked at."""
    smooth: int = 3
    """Steps whose median is compared with it: single messages may be late for many reasons."""
    threshold: float = 0.8
    """Of the reference: a rank whose links give less begins to vote."""
    recovered: float = 0.9
    """Of the reference: a rank that votes goes on until its links give more."""
    patience: int = 1
    """How often all ranks must have voted, in steps in a row with a majority: once all together, or two majorities."""
    cooldown: int = 20
    """Steps after a switch, or after an alarm without one, in which there is no alarm."""
    gain: float = 0.15
    """By what share sums over the present topology must take longer than they did for others to be tried, and what
    share of their time another one must save in a step to be stayed with."""
    revert_after: int = 2
    """Successive trials in which the first topology must be as quick as it was."""

    def __post_init__(self) -> None:
        check_numbers(threshold=self.threshold, recovered=self.recovered, gain=self.gain)
        counts = ("window", "warmup", "smooth", "patience", "cooldown", "revert_after")
        check_whole(**{name: getattr(self, name) for name in counts})
        if not 0 < self.threshold < self.recovered <= 1:
            raise ConfigError(
                f"threshold={self.threshold} and recovered={self.recovered} contradict each other; choose 0 < "
                f"threshold < recovered <= 1"
            )
        for name in ("window", "smooth", "patience", "revert_after"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is no number of steps; choose 1 or more")
        if min(self.warmup, self.cooldown) < 0 or not 0 <= self.gain < 1:
            raise ConfigError(
                f"warmup={self.warmup}, cooldown={self.cooldown} must be 0 or more, and gain={self.gain} below 1"
            )


@dataclass
class _Series:
    clean: deque[float]
    recent: deque[float]
    slow: bool = False


@dataclass
class Interference:
    """The same on all ranks: it is given what every rank has measured."""

    ranks: int
    settings: InterferenceSettings = field(default_factory=InterferenceSettings)

    def __post_init__(self) -> None:
        self._quiet = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """With another topology there is another reference."""
        window, smooth = self.settings.window, self.settings.smooth
        self._series = [
            [_Series(deque(maxlen=window), deque(maxlen=smooth)) for _ in range(2)] for _ in range(self.ranks)
        ]
        self._skipped = self._added_up = self._calmed = self._calm = 0

    def rest(self, steps: int | None = None) -> None:
        """After an alarm: none for a while."""
        self._quiet, self._added_up = self.settings.cooldown if steps is None else steps, 0

    def calm_down(self) -> None:
        """After an alarm without a cause: none for a moment, then for longer; in the end this is what links give."""
        steps = _MOMENT << self._calmed
        if steps < self.settings.cooldown:
            self._calmed += 1
            self.rest(steps)
        else:
            self.begin_anew()
            self.rest()

    @property
    def votes(self) -> tuple[bool, ...]:
        return tuple(any(series.slow for series in both) for both in self._series)

    def observe(self, incoming: Sequence[float], outgoing: Sequence[float] = (), *, steps: int = 1) -> bool:
        """What the links of each rank gave in one step; NaN or 0 where nothing was measured. Is this an alarm?

        Args:
            steps: since the last one that was observed.
        """
        self._quiet = max(0, self._quiet - steps)
        if self._skipped < self.settings.warmup:
            self._skipped += 1
            return False
        for direction, values in enumerate((incoming, outgoing)):
            for both, value in zip(self._series, values, strict=False):
                self._look(both[direction], value)
        votes = sum(self.votes)
        majority = 2 * votes > self.ranks
        self._calm = 0 if majority else self._calm + steps
        if self._calm >= self.settings.cooldown:
            self._calmed = 0
        self._added_up = self._added_up + votes if majority else 0
        return self._added_up >= self.settings.patience * self.ranks and not self._quiet

    def _look(self, series: _Series, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            return
        series.recent.append(value)
        if len(series.clean) < self.settings.window:
            series.clean.append(value)
            return
        share = statistics.median_low(series.recent) / statistics.median(series.clean)
        series.slow = share < (self.settings.recovered if series.slow else self.settings.threshold)
        if value > self.settings.threshold * statistics.median(series.clean) and not series.slow:
            series.clean.append(value)


def throughputs(links: Sequence[Sequence[tuple[float, float]]]) -> tuple[list[float], list[float]]:
    """What came to each rank, and what it sent, a second; of bytes and seconds in flight by receiver and sender."""
    ranks = range(len(links))
    incoming = [_rate([links[rank][peer] for peer in ranks]) for rank in ranks]
    return incoming, [_rate([links[peer][rank] for peer in ranks]) for rank in ranks]


def _rate(links: Sequence[tuple[float, float]]) -> float:
    in_flight_s = sum(seconds for _, seconds in links)
    return sum(size for size, _ in links) / in_flight_s if in_flight_s > 0 else math.nan


@dataclass
class Reversal:
    """Is the first topology as quick again as it was?"""

    clean_s: float
    settings: InterferenceSettings
    count: int = 0

    @property
    def limit_s(self) -> float:
        """Of a trial that is as quick as it was."""
        return self.clean_s / self.settings.recovered

    def is_far_off(self, first_s: float) -> bool:
        """A trial need not be repeated, and the next one may come later."""
        return first_s > _FAR_OFF * self.limit_s

    def observe(self, first_s: float) -> bool:
        """A trial of the first one. Whether to go back to it: also from one that is quicker, since it was chosen."""
        self.count = self.count + 1 if first_s <= self.limit_s else 0
        return self.count >= self.settings.revert_after
