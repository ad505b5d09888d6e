"""What several pipelines cannot do, refused; and the rule of those that add up gradients."""

from collections.abc import Mapping, Sequence
from typing import Any

from pl_pipe.comm.synchronizers.port import Rule, StepFacts
from pl_pipe.errors import ConfigError
from pl_pipe.partition import Plan


class Summed(Rule):
    """`allreduce`: gradients have been added up on their way, while backward ran."""

    lockstep = True

    def after_update(self) -> None:
        self.facts = StepFacts(self.worker.workers)


def check_plan_options(options: Mapping[str, Any]) -> None:
    topology = options.get("topology", "native")
    if topology != "native":
        raise ConfigError(
            f"topology={topology} is for replicated stages of one pipeline, and here a stage's replicas are other "
            f"pipelines', which average by the synchronizer's own messages; leave it out, or choose strategy=pipedream"
        )
    if options.get("replicas") is not None:
        raise ConfigError(
            f"replicas={list(options['replicas'])}, but the replicas of a stage are the other pipelines'; set "
            f"pipelines={max(options['replicas'])} instead, or choose strategy=pipedream"
        )


def pipelines_of(replicas: Sequence[int] | None) -> int | None:
    """Replicated stages, as so many whole pipelines."""
    if replicas is None:
        return None
    if len(set(replicas)) != 1:
        raise ConfigError(
            f"replicas={list(replicas)}, but with a synchronizer other than allreduce a stage's replicas are those of "
            f"whole pipelines, and each stage has as many; give equal numbers, or set synchronizer=allreduce"
        )
    return int(replicas[0])


def check_straight(plan: Plan, depth: int, pipelines: int) -> None:
    if any(stage.replicas > 1 for stage in plan.stages):
        raise ConfigError(
            f"the plan {plan.shape} has stages on several devices, but the replicas of a stage are the other "
            f"pipelines'; give a plan with one device a stage, or choose strategy=pipedream"
        )
    if len(plan.stages) != depth:
        raise ConfigError(
            f"the model can be cut into {len(plan.stages)} stage(s) here, and each of the {pipelines} pipelines has "
            f"{depth} devices; set trainer.devices={pipelines * max(2, len(plan.stages))}"
        )
