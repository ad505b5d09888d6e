"""`simulate`: a plan's programs, timed on its costs and its cluster. partition, schedule -> *simulate* -> report."""

from collections.abc import Mapping
from dataclasses import dataclass

from pl_pipe.errors import ConfigError, ScheduleError
from pl_pipe.events import Event
from pl_pipe.partition import Plan
from pl_pipe.schedule import Programs, weight_versions
from pl_pipe.simulate.engine import Engine
from pl_pipe.simulate.measures import busy_share, peak_memory, steady_window
from pl_pipe.simulate.options import UNDISTURBED, SimulationOptions


@dataclass(frozen=True)
class Simulation:
    """What a run of a plan would take."""

    schedule: str
    batches: int
    makespan_s: float
    """From the first forward to the end of the last update."""
    step_s: float
    """Time between mini-batches when the pipeline is full; of a flushing schedule, bubbles included."""
    window_s: tuple[float, float]
    """The steady part of the run, in which step, bubbles and utilisation are measured."""
    bubble_fraction: float
    """Share of the ranks' time in which they compute nothing."""
    utilisation: Mapping[int, float]
    """By rank, share of the time spent in forwards and backwards."""
    link_bytes: Mapping[tuple[int, int], int]
    """By sender and receiver: activations and gradients."""
    level_bytes: tuple[int, ...]
    """The same by level of the cluster."""
    all_reduce_bytes: tuple[int, ...]
    """By level: gradients among replicas, counted as a ring sends them."""
    peak_memory_bytes: Mapping[int, int]
    """By rank."""
    max_staleness: tuple[int, ...]
    """By stage: updates between the weights of a gradient and those it is applied to."""
    events: tuple[Event, ...]
    """In order of time; empty if not recorded."""

    @property
    def throughput(self) -> float:
        """Mini-batches a second."""
        return 1 / self.step_s if self.step_s else float("inf")


def simulate(plan: Plan, programs: Programs, *, options: SimulationOptions = UNDISTURBED) -> Simulation:
    """Runs `programs`, made from `plan`, and measures them."""
    _check_fit(plan, programs, options)
    engine = Engine(plan, programs, options)
    engine.run()
    window = steady_window(programs, engine)
    versions = weight_versions(programs)
    utilisation = {rank: busy_share(trace, window) for rank, trace in engine.ranks.items()}
    return Simulation(
        schedule=programs.schedule,
        batches=programs.batches,
        makespan_s=engine.makespan_s,
        step_s=window.step_s,
        window_s=(window.start_s, window.end_s),
        bubble_fraction=1 - sum(utilisation.values()) / len(utilisation),
        utilisation=utilisation,
        link_bytes=engine.link_bytes,
        level_bytes=tuple(engine.level_bytes),
        all_reduce_bytes=tuple(engine.all_reduce_bytes),
        peak_memory_bytes=peak_memory(plan, programs, versions, options),
        max_staleness=tuple(max(versions[rank].max_staleness for rank in ranks) for ranks in programs.stages),
        events=tuple(engine.events),
    )


def _check_fit(plan: Plan, programs: Programs, options: SimulationOptions) -> None:
    if programs.stages != tuple(stage.ranks for stage in plan.stages):
        shape = "-".join(str(len(ranks)) for ranks in programs.stages)
        raise ScheduleError(f"programs are for a plan {shape}, the plan is {plan.shape}; build them from this plan")
    for rank in options.slowdown:
        if rank not in programs.by_rank:
            raise ConfigError(
                f"slowdown names rank {rank}, which plan {plan.shape} does not use; name one of its ranks"
            )
    for level in options.contention:
        if not 0 <= level < len(plan.cluster.levels):
            raise ConfigError(f"contention names level {level}, the cluster has {len(plan.cluster.levels)}, from 0")
