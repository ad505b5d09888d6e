"""Other traffic on the links changes the topology; its end changes it back. Interference -> *policy* -> strategy."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
from typing_extensions import override

from pl_pipe.adapt.monitors.links import LinkThroughput, adaptable_sums
from pl_pipe.adapt.policies.base import STOP, Policy, made_of
from pl_pipe.adapt.policies.interference import (
    Interference,
    InterferenceSettings,
    Reversal,
    throughputs,
)
from pl_pipe.adapt.policies.race import Race
from pl_pipe.checks import check_whole
from pl_pipe.comm.topology import AdaptableSums, Topology, candidates
from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.report.steps_seen import Switch, WatchedStep

log = get_logger(__name__)

_RIVALS, _CLEARLY = 2, 0.6
"""How many of those that are quickest in a short trial are used for some steps each; one alone, if its sums take so
much less time than those of the next."""
_SPARSELY = 4
"""Over another topology than the first, so often a step is watched: what it costs is felt where links are busy."""
_DOUBTING_TURNS = 3
"""Sums by which it is found whether an alarm has a cause."""
_WORTH, _STEPS_TIMED = 0.02, 3
"""Of a step's time, by the median of so many: what its sums must have lost for another topology to be of use."""
_STEPS_KEPT = 10_000


@dataclass(frozen=True)
class SwitchTopology:
    """By name or fathers, or a topology that has been made."""

    topology: str | Sequence[int] | Topology

    def __repr__(self) -> str:
        made = self.topology
        return f"SwitchTopology({f'{made.name} {made.digest()}' if isinstance(made, Topology) else made})"

    def apply(self, trainer: L.Trainer) -> None:
        strategy: Any = trainer.strategy
        if not hasattr(strategy, "switch_topology"):
            raise ConfigError(f"{type(strategy).__name__} has no topology to switch; set strategy=adaptive")
        strategy.switch_topology(self.topology)


class InterferencePolicy(Policy):
    """Watches links, and switches to the quickest topology while other traffic slows most ranks down.

    If sums over the present topology really take longer than they did (messages are late for other reasons too), those
    that are quickest in a short trial are used in turn, and the one with the shortest steps stays. Every `probe_every`
    steps it is tried whether the first one is as quick again as it was. What others switch to takes the first one's
    place: somebody has chosen it.
    Native sums have no messages to watch: there, such trials are watched.
    """

    def __init__(self, *, probe_every: int = 10, on_error: str = STOP, **settings: Any) -> None:
        """
        Args:
            probe_every: steps between trials, while the topology is not the first, or is native.
            settings: those of InterferenceSettings.
        """
        super().__init__(interval=1, on_error=on_error)
        check_whole(probe_every=probe_every)
        if probe_every < 1:
            raise ConfigError(f"probe_every={probe_every} is no number of steps; choose 1 or more")
        self.probe_every = probe_every
        self.settings = made_of(InterferenceSettings, settings, whose="InterferencePolicy")
        self.events: list[dict[str, Any]] = []
        """What was noticed and done in this fit, by step."""
        self.steps: deque[WatchedStep] = deque(maxlen=_STEPS_KEPT)
        """The latest of this fit, as far as their links were watched."""
        self._before_s: float | None = None
        self._step_s = 0.0
        """Of the one that has just ended, without what policies did in it."""
        self._votes = 0
        self._monitor: LinkThroughput | None = None
        self._may_rest = False
        """Whether the monitor is the policy's own."""
        self._judged: Sequence[Sequence[tuple[float, float]]] = ()
        self._switched_at = 0
        self._next_probe = 0
        self._race: tuple[Race, dict[str, Topology]] | None = None
        """After an alarm, with those that take part and the one before."""
        self._observed_at = 0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if stage != "fit":
            return
        if not hasattr(trainer.strategy, "switch_topology"):
            raise ConfigError(
                f"InterferencePolicy (policy=interference) changes the topology of strategy=adaptive, and this is "
                f"{type(trainer.strategy).__name__}; set strategy=adaptive, or remove it"
            )
        self._monitor = next((one for one in callbacks if isinstance(one, LinkThroughput)), None)
        self._may_rest = self._may_rest or self._monitor is None
        if self._monitor is None:
            self._monitor = LinkThroughput()
            callbacks.insert(callbacks.index(self), self._monitor)
        elif callbacks.index(self._monitor) > callbacks.index(self):
            callbacks.remove(self._monitor)
            callbacks.insert(callbacks.index(self), self._monitor)

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.events, self._before_s = [], None
        self.steps.clear()
        self._observed_at = self._switched_at = trainer.global_step
        self._begin_with(adaptable_sums(self, trainer))

    def _begin_with(self, sums: AdaptableSums) -> None:
        """The present topology is the one to come back to, with a reference of its own."""
        self._home = self._known = sums.topology
        self._watch_every(1)
        self._race, self._next_probe = None, 0
        self._usual_s = self._usual_at_home_s = sums.trial([self._home], whole=True)[self._home.name]
        """Of a whole sum over the present topology, when it was begun with."""
        self._reversal = Reversal(sums.trial([self._home])[self._home.name], self.settings)
        self._detector = Interference(len(sums.hosts), self.settings)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        folder = trainer.log_dir  # which all ranks must ask for
        if not self.events or folder is None or not trainer.is_global_zero:
            return
        from pl_pipe.report.adaptation_chart import draw_adaptation  # matplotlib takes a second to import

        path = Path(folder) / "topology.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        switches = [
            Switch(event["step"], f"{event['present']} -> {event['best']}") for event in self.events if event["best"]
        ]
        draw_adaptation(self.steps, switches, path, ranks=trainer.world_size)
        log.info("steps, votes and switches: %s", path)

    @override
    def decide(self, trainer: L.Trainer) -> SwitchTopology | None:
        self._step_s = 0.0 if self._before_s is None else time.perf_counter() - self._before_s
        change = self._change(trainer)
        now_s = time.perf_counter()
        if self._before_s is not None:
            self.steps.append(WatchedStep(trainer.global_step, now_s - self._before_s, self._votes))
        self._before_s = now_s
        return change

    def _change(self, trainer: L.Trainer) -> SwitchTopology | None:
        sums = adaptable_sums(self, trainer)
        present = sums.topology
        if present is not self._known:  # its equal, too, is another's choice
            self._begin_with(sums)
            self._votes, self._switched_at = 0, trainer.global_step
            return None
        if self._race is not None:
            return self._next_turn(trainer, present, *self._race)
        probes = trainer.global_step % self.probe_every == 0
        if present.is_native:
            if not probes:
                return None
            seconds = sums.trial([present], turns=1)[present.name]
            alarm = self._observed(trainer, [1 / seconds] * trainer.world_size)
        else:
            alarm = self._has_new_links() and self._observed(trainer, *throughputs(self._judged))
        self._votes = sum(self._detector.votes)  # before a switch begins them anew
        if alarm:
            return self._alternative(trainer, present)
        if probes and present.digest() != self._home.digest():
            return self._way_back(trainer, present)
        return None

    def _has_new_links(self) -> bool:
        """Some that were measured over the present topology, and not judged yet: a monitor may have an interval."""
        assert self._monitor is not None
        links, before = self._monitor.links, self._judged
        self._judged = links
        is_measured = any(in_flight_s > 0 for row in links for _, in_flight_s in row)
        return links is not before and is_measured and self._monitor.measured_step >= self._switched_at

    def _observed(self, trainer: L.Trainer, *rates: Sequence[float]) -> bool:
        steps, self._observed_at = trainer.global_step - self._observed_at, trainer.global_step
        return self._detector.observe(*rates, steps=steps)

    def _alternative(self, trainer: L.Trainer, present: Topology) -> SwitchTopology | None:
        sums = adaptable_sums(self, trainer)
        votes = sum(self._detector.votes)
        recent = [step.seconds for step in self.steps][-_STEPS_TIMED:]
        step_s = sums.slowest(median(recent) if recent else 0.0)
        present_s = sums.trial([present], turns=_DOUBTING_TURNS, whole=True)
        if not self._matters(sums, present_s[present.name], step_s):
            self._note(trainer, "alarm", votes=votes, present=present.name, best=None, seconds=present_s)
            self._detector.calm_down()
            return None
        known = {topology.digest(): topology for topology in [*candidates(sums.hosts), self._home]}
        known[present.digest()] = present
        by_name = {topology.name: topology for topology in known.values()}
        small_s = sums.trial(list(by_name.values()), turns=2)
        quicker = [name for name in small_s if small_s[name] < small_s[present.name]]
        rivals = sorted(quicker, key=lambda name: (small_s[name], name))[:_RIVALS]
        if len(rivals) > 1 and small_s[rivals[0]] < _CLEARLY * small_s[rivals[1]]:
            del rivals[1:]
        first = rivals[0] if rivals else None
        self._note(trainer, "alarm", votes=votes, present=present.name, best=first, seconds=small_s)
        if first is None:
            self._detector.rest()
            return None
        must_save_s = self.settings.gain * present_s[present.name] * sums.whole_trials_a_step
        self._race = Race(rivals, step_s, must_save_s), {name: by_name[name] for name in (present.name, *rivals)}
        return self._switch_to(trainer, by_name[first])

    def _matters(self, sums: AdaptableSums, present_s: float, step_s: float) -> bool:
        """Sums take longer than they did, by something that a step would notice."""
        lost_s = (present_s - self._usual_s) * sums.whole_trials_a_step
        return present_s > (1 + self.settings.gain) * self._usual_s and lost_s > _WORTH * step_s

    def _next_turn(
        self, trainer: L.Trainer, present: Topology, race: Race, by_name: dict[str, Topology]
    ) -> SwitchTopology | None:
        sums = adaptable_sums(self, trainer)
        if not race.observe(sums.slowest(self._step_s)):
            return None
        if race.runner is not None:
            self._note(trainer, "turn", present=present.name, best=race.runner, seconds=dict(race.steps_s))
            return self._switch_to(trainer, by_name[race.runner])
        before, *_ = by_name
        winner = by_name[race.winner or before]
        best = None if winner is present else winner.name
        self._note(trainer, "choice", present=present.name, best=best, seconds={before: race.before_s, **race.steps_s})
        self._race = None
        self._next_probe = trainer.global_step + self.probe_every
        self._detector.rest()
        usual_s = self._usual_at_home_s if winner is self._home else sums.trial([winner], whole=True)[winner.name]
        change = self._switch_to(trainer, winner, usual_s)
        return None if best is None else change

    def _way_back(self, trainer: L.Trainer, present: Topology) -> SwitchTopology | None:
        """Under traffic, trials of the first topology are slow: one sum tells mostly enough, every other time."""
        if trainer.global_step < self._next_probe:
            return None
        sums, name = adaptable_sums(self, trainer), self._home.name
        seconds = sums.trial([self._home], turns=1)
        is_far_off = self._reversal.is_far_off(seconds[name])
        self._next_probe = trainer.global_step + self.probe_every * (2 if is_far_off else 1)
        if not is_far_off and seconds[name] > self._reversal.limit_s:
            seconds = sums.trial([self._home], turns=1)
        if not self._reversal.observe(seconds[name]):
            return None
        self._note(trainer, "revert", present=present.name, best=self._home.name, seconds=seconds)
        self._detector.rest()
        return self._switch_to(trainer, self._home, self._usual_at_home_s)

    def _switch_to(self, trainer: L.Trainer, topology: Topology, usual_s: float = math.inf) -> SwitchTopology:
        """
        Args:
            usual_s: of a whole sum; where it is not for long, nobody asks.
        """
        self._detector.begin_anew()
        self._switched_at = trainer.global_step
        self._usual_s, self._reversal.count = usual_s, 0
        self._known = topology
        self._watch_every(1 if topology is self._home else _SPARSELY)
        return SwitchTopology(topology)

    def _watch_every(self, steps: int) -> None:
        if self._may_rest and self._monitor is not None:
            self._monitor.every = steps

    def _note(self, trainer: L.Trainer, what: str, **facts: Any) -> None:
        self.events.append({"step": trainer.global_step, "what": what, **facts})
        if trainer.is_global_zero:
            step, present, best = trainer.global_step, facts["present"], facts["best"]
            shown = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in facts["seconds"].items())
            done = f"{present} -> {best}" if best else f"{present} stays"
            if what == "alarm":
                told = f"{facts['votes']} of {trainer.world_size} ranks say that their links are slow"
                log.info("step %d: %s; trials: %s; %s", step, told, shown, done)
            elif what == "revert":
                log.info("step %d: %s is as quick again as it was (%s)", step, best, shown)
            else:
                log.info("step %d: steps by topology: %s; %s", step, shown, done)
