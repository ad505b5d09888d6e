"""What a run comes to: pace, idle share, memory. engine -> *measures* -> Simulation."""

import math
from dataclasses import dataclass

import numpy as np

from pl_pipe.partition import Plan
from pl_pipe.schedule import Programs, RankVersions, warmups
from pl_pipe.simulate.engine import Engine, RankTrace
from pl_pipe.simulate.options import SimulationOptions


@dataclass(frozen=True)
class Window:
    """The part of a run in which the pipeline is full."""

    start_s: float
    end_s: float
    batches: int
    """Mini-batches that came out of it meanwhile."""

    @property
    def step_s(self) -> float:
        return (self.end_s - self.start_s) / self.batches


def steady_batches(plan: Plan, deeper: float = 0.0) -> int:
    """Mini-batches enough for a run that never flushes to have a steady window: filling, two windows, draining."""
    in_flight = (warmups(plan, deeper)[0] + 1) * plan.replicas[0]
    return 3 * in_flight + 4 * max(plan.replicas) + 32


def steady_window(programs: Programs, engine: Engine) -> Window:
    """Where the pace is measured: from one mini-batch's end to another's, whole periods of the schedule apart.

    A flushing schedule is measured over whole groups, of the second half. The others are measured over the second half
    of what ends before the drain, for then forwards cease. A run too short for that is measured as a whole.
    """
    done_s, batches = engine.done_s, programs.batches
    if programs.flushes:
        every = programs.update_every[0]
        whole = batches // every
        if whole > 1:
            ends_s = [max(done_s[group * every : (group + 1) * every]) for group in range(whole)]
            first = (whole - 1) // 2
            return Window(ends_s[first], ends_s[-1], (whole - 1 - first) * every)
    else:
        depth = max(programs.in_flight.values())
        last = batches - 1 - max(programs.in_flight[rank] * len(ranks) for ranks in programs.stages for rank in ranks)
        replicas = [len(ranks) for ranks in programs.stages]
        round_ = math.lcm(*replicas)
        whole = math.lcm(round_, *programs.update_every)
        # A pace may alternate from one mini-batch in flight to the next, hence the first choice.
        for period in (whole * depth, whole, round_, programs.update_every[0], replicas[0]):
            if period <= last:
                count = max((last - last // 2) // period, 1) * period
                return Window(done_s[last - count], done_s[last], count)
    return Window(0.0, engine.makespan_s, batches)


def busy_share(trace: RankTrace, window: Window) -> float:
    """How much of the window a rank spent in forwards and backwards."""
    length_s = window.end_s - window.start_s
    if length_s <= 0:
        return 0.0
    starts_s, ends_s = (
        np.clip(np.asarray(dates), window.start_s, window.end_s) for dates in (trace.starts_s, trace.ends_s)
    )
    return float((ends_s - starts_s).sum() / length_s)


def peak_memory(
    plan: Plan, programs: Programs, versions: dict[int, RankVersions], options: SimulationOptions
) -> dict[int, int]:
    """By rank, in bytes: weight versions, one gradient, the optimizer's state, and activations of what is in flight."""
    found = {}
    for stage in plan.stages:
        for rank in stage.ranks:
            copies = versions[rank].kept + 1 + options.optimizer_state_factor
            activations = programs.in_flight[rank] * stage.activation_bytes
            found[rank] = round(copies * stage.parameter_bytes) + activations
    return found
