"""Runs a schedule on profiled costs and a cluster. partition, schedule -> *simulate* -> report."""

from pl_pipe.simulate.baselines import (
    data_parallel_plan,
    simulate_data_parallel,
    simulate_single_device,
    single_device_plan,
)
from pl_pipe.simulate.measures import steady_batches
from pl_pipe.simulate.options import SimulationOptions
from pl_pipe.simulate.simulation import Simulation, simulate
from pl_pipe.simulate.sweep import Partition, SweepPoint, sweep

__all__ = [
    "Partition",
    "Simulation",
    "SimulationOptions",
    "SweepPoint",
    "data_parallel_plan",
    "simulate",
    "simulate_data_parallel",
    "simulate_single_device",
    "single_device_plan",
    "steady_batches",
    "sweep",
]
