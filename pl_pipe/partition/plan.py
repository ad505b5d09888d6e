"""What the optimizer decides: stages, their replicas and their places. partition -> *Plan* -> schedule, simulate.

A plan is complete in itself: the simulator and the pipeline need nothing of the profile it was made from.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError
from pl_pipe.graph import LayerGraph

SCHEMA = 1


@dataclass(frozen=True)
class Stage:
    """Layers that run together, on each of `ranks`."""

    nodes: tuple[str, ...]
    """Names of layers, in execution order."""
    modules: tuple[str, ...]
    """The modules among them, by qualified name."""
    ranks: tuple[int, ...]
    forward_s: float
    """For one mini-batch on one worker."""
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    """Kept from a mini-batch's forward to its backward."""

    @property
    def replicas(self) -> int:
        return len(self.ranks)

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Transfer:
    """What one stage sends another for each mini-batch; a gradient of the same size comes back."""

    source: int
    target: int
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """A model cut into stages for a cluster, with the prices of the alternatives."""

    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    """In order of source and target; a tensor needed by several later stages is passed on from one to the next."""
    cluster: Cluster
    cost_model: str
    predicted_step_s: float
    """Time between mini-batches when the pipeline is full."""
    data_parallel_step_s: float
    uniform_step_s: float | None
    """A straight pipeline of stages with equal numbers of layers; None where there are fewer layers than workers."""
    single_device_step_s: float

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan has no stages; it takes at least one")
        for index, stage in enumerate(self.stages):
            if not stage.ranks or not stage.nodes:
                raise PlanError(f"stage {index} of the plan has {len(stage.nodes)} layers on ranks {stage.ranks}")
            beyond = [rank for rank in stage.ranks if not 0 <= rank < self.cluster.workers]
            if beyond:
                raise PlanError(f"stage {index} has rank {beyond[0]}, but the cluster has {self.cluster.workers}")
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        if len(ranks) != len(set(ranks)):
            raise PlanError("a rank stands in two stages of the plan; a rank runs one stage")
        for transfer in self.transfers:
            if not 0 <= transfer.source < transfer.target < len(self.stages):
                raise PlanError(f"the plan sends from stage {transfer.source} to {transfer.target}; data flow onward")

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(stage.replicas for stage in self.stages)

    @property
    def ranks(self) -> int:
        return sum(self.replicas)

    @property
    def round(self) -> int:
        """Mini-batches after which every replica of every stage has had equally many."""
        return math.lcm(*self.replicas)

    @property
    def shape(self) -> str:
        """`15-1`: replicas by stage."""
        return "-".join(str(count) for count in self.replicas)

    @property
    def speedup_over_data_parallel(self) -> float:
        return self.data_parallel_step_s / self.predicted_step_s

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cost_model": self.cost_model,
            "stages": [
                {**asdict(stage), "replicas": stage.replicas, "compute_s": stage.compute_s} for stage in self.stages
            ],
            "transfers": [asdict(transfer) for transfer in self.transfers],
            "cluster": self.cluster.as_json(),
            "predicted_step_s": self.predicted_step_s,
            "data_parallel_step_s": self.data_parallel_step_s,
            "uniform_step_s": self.uniform_step_s,
            "single_device_step_s": self.single_device_step_s,
            "speedup_over_data_parallel": self.speedup_over_data_parallel,
        }

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> "Plan":
        if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
            found = content.get("schema") if isinstance(content, Mapping) else type(content).__name__
            raise PlanError(f"{source} is not a plan of schema {SCHEMA} (schema: {found}); make it with pl-pipe plan")
        try:
            stages = tuple(
                Stage(
                    nodes=tuple(entry["nodes"]),
                    modules=tuple(entry["modules"]),
                    ranks=tuple(int(rank) for rank in entry["ranks"]),
                    forward_s=float(entry["forward_s"]),
                    backward_s=float(entry["backward_s"]),
                    parameter_bytes=int(entry["parameter_bytes"]),
                    activation_bytes=int(entry["activation_bytes"]),
                )
                for entry in content["stages"]
            )
            return cls(
                stages=stages,
                transfers=tuple(Transfer(**entry) for entry in content["transfers"]),
                cluster=Cluster.from_json(content["cluster"], source=source),
                cost_model=str(content["cost_model"]),
                predicted_step_s=float(content["predicted_step_s"]),
                data_parallel_step_s=float(content["data_parallel_step_s"]),
                uniform_step_s=content["uniform_step_s"],
                single_device_step_s=float(content["single_device_step_s"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{source} cannot be read as a plan: {error!r}; make it anew with pl-pipe plan") from error

    def check_fits(self, graph: LayerGraph, *, source: str = "the plan") -> None:
        """Refuses a plan that was made for another model."""
        planned = {name for stage in self.stages for name in stage.nodes}
        for missing, where in (
            (planned - set(graph.by_name), f"{source} names layers that the model does not have"),
            (set(graph.by_name) - planned, f"the model has layers that {source} does not name"),
        ):
            if missing:
                shown = ", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else "")
                raise PlanError(f"{where}: {shown} ({len(missing)} in all); make a plan from this model's own profile")


def write_plan(plan: Plan, path: Path) -> None:
    path.write_text(json.dumps(plan.as_json(), indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}; `pl-pipe plan` writes such a file") from error
    return Plan.from_json(content, source=str(path))
