"""Callbacks that decide while training runs, over pure rules. All ranks compare decisions before anything changes."""

from pl_pipe.adapt.policies.base import Change, Policy, PolicyError
from pl_pipe.adapt.policies.elastic import ElasticPolicy, Workers
from pl_pipe.adapt.policies.noise_batch import NoiseBatchPolicy, ResizeBatch
from pl_pipe.adapt.policies.topology import InterferencePolicy, SwitchTopology

__all__ = [
    "Change",
    "ElasticPolicy",
    "InterferencePolicy",
    "NoiseBatchPolicy",
    "Policy",
    "PolicyError",
    "ResizeBatch",
    "SwitchTopology",
    "Workers",
]
