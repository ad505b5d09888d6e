"""The configuration of `strategy=auto`."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class AutoConfig:
    """One device, data parallel or a pipeline: the planner's choice."""

    _target_: str = "pl_pipe.strategies.auto_config.auto"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    schedule: str = "pipedream"
    """Of a pipeline, should one be chosen: `pipedream`, `pipedream_2bw`, `1f1b` or `gpipe`."""
    num_microbatches: int | None = None
    """What a batch is divided into, except by `pipedream`; null is the number of stages times a round."""
    vertical_sync: bool = False
    """For `pipedream`: all stages use the weight version of the first."""
    update: str = "round"
    """For `pipedream` with replicas: an update a `round` of batches, or with each `minibatch` of a replica."""
    cluster: str = "local"
    """Links that the choice counts on: `local`, `probe` (measured at setup), or a cluster.json of `pl-pipe probe`."""
    wire_dtype: str | None = None
    """`bf16` or `fp16`: activations and gradients are rounded on their way."""
    recompute: bool = False
    """Stages keep what they received, and run their forward again for the backward."""
    backend: str = "auto"
    """What carries messages: `gloo`, `nccl`, or by the devices."""
    share_device: bool = False
    """Several ranks on one GPU."""
    load_data: str = "all"
    """`needed`: only ranks whose stage takes tensors of the batch load it."""
    timeout_s: float = 300.0
    """A peer that is silent for longer is an error."""


def auto(**settings: Any) -> object:
    from pl_pipe.strategies.auto import AutoStrategy  # composing a configuration must stay quick

    return AutoStrategy(**settings)
