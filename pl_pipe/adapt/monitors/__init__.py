"""Callbacks that measure while training runs, and decide nothing. Any strategy can have them where they make sense."""

from pl_pipe.adapt.monitors.base import Monitor
from pl_pipe.adapt.monitors.links import LinkThroughput, PeerLatencies
from pl_pipe.adapt.monitors.noise_scale import GradientNoiseScale
from pl_pipe.adapt.monitors.prometheus import PrometheusEndpoint
from pl_pipe.adapt.monitors.step_time import StepTime
from pl_pipe.adapt.monitors.variance import GradientVariance

__all__ = [
    "GradientNoiseScale",
    "GradientVariance",
    "LinkThroughput",
    "Monitor",
    "PeerLatencies",
    "PrometheusEndpoint",
    "StepTime",
]
