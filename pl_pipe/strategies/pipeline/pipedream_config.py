"""The configuration of `strategy=pipedream`."""

from dataclasses import dataclass, field
from typing import Any

from pl_pipe.strategies.requirements import StrategyAbout


@dataclass
class PipeDreamConfig:
    """A pipeline of stages, each on one device or several."""

    _target_: str = "pl_pipe.strategies.pipeline.pipedream_config.pipedream"
    about: StrategyAbout = field(default_factory=StrategyAbout)
    plan: str = "auto"
    """`auto` profiles the model on first use and makes the quickest plan, replicated stages among them; `straight` the
    quickest with one device a stage; or a plan.json that `pl-pipe plan` wrote."""
    schedule: str = "pipedream"
    """`pipedream`, `pipedream_2bw`, `1f1b` or `gpipe`."""
    num_microbatches: int | None = None
    """What a batch is divided into, except by `pipedream`; null is the number of stages times a round."""
    split_points: list[str] | None = None
    """Modules after which a stage ends, instead of a plan."""
    replicas: list[int] | None = None
    """How many devices each of those stages has, such as [3,1]; null is one."""
    update: str = "round"
    """For `pipedream` with replicas: an update a `round` of batches, or with each `minibatch` of a replica."""
    cluster: str = "local"
    """Links that a plan counts on: `local`, `probe` (measured at setup), or a cluster.json of `pl-pipe probe`."""
    vertical_sync: bool = False
    """For `pipedream`: all stages use the weight version of the first."""
    timeout_s: float = 300.0
    """A peer that is silent for longer is an error."""
    wire_dtype: str | None = None
    """`bf16` or `fp16`: wider activations and gradients are rounded to it on their way between stages."""
    recompute: bool = False
    """Stages keep only what they received, and run their forward again for the backward."""
    backend: str = "auto"
    """What carries the messages: `gloo`, `nccl`, or `auto`, by the devices."""
    share_device: bool = False
    """Several ranks on one CUDA device; trainer.devices counts ranks."""
    load_data: str = "all"
    """`all` ranks load every batch; `needed`: only those whose stage takes tensors of it."""
    synchronizer: str = "allreduce"
    """What replicas of a stage do after an update. `allreduce` adds up their gradients. With another one
    (`partial_reduce`, `ad_psgd`, `sma`, `pair`, `wave`, `local`) this is `strategy=sdpipe`: as many pipelines as the
    stages have replicas."""
    topology: Any = "native"
    """Over which the replicas of a stage add up their gradients: a name such as `ring` or `star`, or fathers."""


def pipedream(*, synchronizer: str = "allreduce", **settings: Any) -> object:
    # Lightning is imported inside: composing a configuration must stay quick.
    if synchronizer != "allreduce":
        from pl_pipe.strategies.uneven.sdpipe import SDPipeStrategy
        from pl_pipe.strategies.uneven.sdpipe_support import pipelines_of

        return SDPipeStrategy(synchronizer, pipelines=pipelines_of(settings.pop("replicas", None)), **settings)
    from pl_pipe.strategies.pipeline.pipedream import PipeDreamStrategy

    return PipeDreamStrategy(**settings)
