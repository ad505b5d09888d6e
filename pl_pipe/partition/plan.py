"""What the optimizer decides: stages, their replicas and their places. partition -> *Plan* -> schedule, simulate.

A plan is complete in itself: the simulator and the pipeline need nothing of the profile it was made from.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pl_pipe.cluster import Cluster
from pl_pipe.errors import PlanError, PlPipeError
from pl_pipe.graph import LayerGraph
from pl_pipe.json_file import check_schema, read_json

SCHEMA = 1
_REMEDY = "make it with pl-pipe plan"


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
    """Kept from a mini-batch's forward to its backward: what the layers save, and what was received for them."""

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "parameter_bytes", "activation_bytes"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise PlanError(f"a stage has {name}={value}; it takes a finite number, 0 or more")
        if not self.ranks or not self.nodes:
            raise PlanError(f"a stage has {len(self.nodes)} layers on ranks {list(self.ranks)}; it takes one of each")

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

    def __post_init__(self) -> None:
        if not 0 <= self.source < self.target:
            raise PlanError(f"a transfer goes from stage {self.source} to stage {self.target}; data flow onward")
        if self.size_bytes < 0:
            raise PlanError(f"a transfer has size_bytes={self.size_bytes}; it takes 0 or more")


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
    activation_compression_ratio: float | None = None
    optimizer_state_factor: float = 2.0

    def __post_init__(self) -> None:
        if not self.stages:
            raise PlanError("a plan has no stages; it takes at least one")
        for index, stage in enumerate(self.stages):
            beyond = [rank for rank in stage.ranks if not 0 <= rank < self.cluster.workers]
            if beyond:
                raise PlanError(
                    f"stage {index} has rank {beyond[0]}, but the cluster has {self.cluster.workers} workers, from 0; "
                    f"make the plan for a larger cluster"
                )
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        if len(ranks) != len(set(ranks)):
            raise PlanError("a rank stands in two stages of the plan; a rank runs one stage")
        for transfer in self.transfers:
            if transfer.target >= len(self.stages):
                raise PlanError(f"the plan sends to stage {transfer.target}, but it has {len(self.stages)}, from 0")

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
        return self.data_parallel_step_s / self.predicted_step_s if self.predicted_step_s else 1.0

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
            "activation_compression_ratio": self.activation_compression_ratio,
            "optimizer_state_factor": self.optimizer_state_factor,
        }

    @classmethod
    def from_json(cls, content: Any, *, source: str) -> "Plan":
        check_schema(content, SCHEMA, source=source, what="plan", error=PlanError, remedy=_REMEDY)
        try:
            stages = tuple(
                Stage(
                    nodes=_names(entry["nodes"]),
                    modules=_names(entry["modules"]),
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
                transfers=tuple(
                    Transfer(**{name: int(value) for name, value in entry.items()}) for entry in content["transfers"]
                ),
                cluster=Cluster.from_json(content["cluster"], source=source),
                cost_model=str(content["cost_model"]),
                predicted_step_s=float(content["predicted_step_s"]),
                data_parallel_step_s=float(content["data_parallel_step_s"]),
                uniform_step_s=_optional(content["uniform_step_s"]),
                single_device_step_s=float(content["single_device_step_s"]),
                activation_compression_ratio=_optional(content["activation_compression_ratio"]),
                optimizer_state_factor=float(content["optimizer_state_factor"]),
            )
        except PlPipeError as error:
            raise PlanError(f"{source} cannot be used: {error}") from error
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise PlanError(f"{source} cannot be read as a plan: {error!r}; {_REMEDY}") from error

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
        for index, stage in enumerate(self.stages):  # names are numbers: another model may have as many layers
            size = sum(graph.by_name[name].parameter_bytes for name in stage.nodes)
            if size != stage.parameter_bytes:
                raise PlanError(
                    f"stage {index} of {source} has {stage.parameter_bytes} bytes of parameters, the model's layers of "
                    f"these names have {size}; make a plan from this model's own profile"
                )


def _names(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise TypeError(f"{entries!r} is not a list of names")
    return tuple(entries)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def write_plan(plan: Plan, path: Path) -> None:
    path.write_text(json.dumps(plan.as_json(), indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    content = read_json(path, name=str(path), error=PlanError, remedy=_REMEDY)
    return Plan.from_json(content, source=str(path))
