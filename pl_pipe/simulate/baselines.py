"""The plans that a pipeline is compared with, made from the pipeline's own costs, and their simulation.

Both sides are simulated alike, so that a speed-up compares like with like.
"""

from collections.abc import Iterable
from dataclasses import replace

from pl_pipe.partition import Plan, Stage
from pl_pipe.schedule import build_programs
from pl_pipe.simulate.measures import steady_batches
from pl_pipe.simulate.options import UNDISTURBED, SimulationOptions
from pl_pipe.simulate.simulation import Simulation, simulate


def data_parallel_plan(plan: Plan) -> Plan:
    """The whole model on every worker of the cluster, also those that `plan` leaves idle."""
    return _one_stage(plan, range(plan.cluster.workers), plan.data_parallel_step_s)


def single_device_plan(plan: Plan) -> Plan:
    """The whole model on the first rank of `plan` alone."""
    return _one_stage(plan, [min(rank for stage in plan.stages for rank in stage.ranks)], plan.single_device_step_s)


def simulate_data_parallel(
    plan: Plan, *, batches: int | None = None, options: SimulationOptions = UNDISTURBED
) -> Simulation:
    """Synchronous data parallelism: a pipeline of one stage, which all-reduces after each local mini-batch."""
    return _simulate(data_parallel_plan(plan), batches, options)


def simulate_single_device(
    plan: Plan, *, batches: int | None = None, options: SimulationOptions = UNDISTURBED
) -> Simulation:
    """One worker by itself, if its memory were large enough."""
    single = single_device_plan(plan)
    slowdown = {rank: factor for rank, factor in options.slowdown.items() if rank in single.stages[0].ranks}
    return _simulate(single, batches, replace(options, slowdown=slowdown))


def _one_stage(plan: Plan, ranks: Iterable[int], step_s: float) -> Plan:
    stage = Stage(
        nodes=tuple(name for stage in plan.stages for name in stage.nodes),
        modules=tuple(name for stage in plan.stages for name in stage.modules),
        ranks=tuple(ranks),
        forward_s=sum(stage.forward_s for stage in plan.stages),
        backward_s=sum(stage.backward_s for stage in plan.stages),
        parameter_bytes=sum(stage.parameter_bytes for stage in plan.stages),
        activation_bytes=sum(stage.activation_bytes for stage in plan.stages),  # a little much: nothing is received
    )
    return replace(plan, stages=(stage,), transfers=(), predicted_step_s=step_s)


def _simulate(plan: Plan, batches: int | None, options: SimulationOptions) -> Simulation:
    if batches is None:
        batches = steady_batches(plan)
    programs = build_programs(plan, schedule="pipedream", batches=batches, update="minibatch")
    return simulate(plan, programs, options=options)
