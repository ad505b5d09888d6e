"""The options of a pipeline, checked, and what they mean for one rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import get_args

from lightning.pytorch.strategies import DDPStrategy

from pl_pipe.cluster import Cluster
from pl_pipe.comm.topology import NATIVE, checked_setting
from pl_pipe.errors import ConfigError
from pl_pipe.partition import Plan
from pl_pipe.runtime.executor_settings import ExecutorSettings
from pl_pipe.schedule import FLUSHING, SCHEDULES, Update, least_accumulate, reading_of, warmups
from pl_pipe.stages import IDLE
from pl_pipe.strategies.pipeline.devices import check_transfers
from pl_pipe.strategies.pipeline.plan_options import check_plan_options

LOAD_DATA = ("all", "needed")


@dataclass(frozen=True)
class PipelineSettings:
    """How the batches of a DataLoader go through the stages.

    `pipedream` takes them as they are; a round of them shares an update, or as many as a stage has replicas. The other
    schedules divide each into micro-batches that share its update, by default as many as keep every rank busy.
    """

    plan: str = "auto"
    schedule: str = "pipedream"
    num_microbatches: int | None = None
    split_points: tuple[str, ...] | None = None
    replicas: tuple[int, ...] | None = None
    update: Update = "round"
    cluster: str | Cluster = "local"
    vertical_sync: bool = False
    timeout_s: float = 300.0
    wire_dtype: str | None = None
    recompute: bool = False
    backend: str = "auto"
    share_device: bool = False
    load_data: str = "all"
    topology: str | tuple[int, ...] = NATIVE

    def __post_init__(self) -> None:
        check_plan_options(plan=self.plan, split_points=self.split_points, replicas=self.replicas, cluster=self.cluster)
        check_transfers(wire_dtype=self.wire_dtype, backend=self.backend, share_device=self.share_device)
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule={self.schedule} is unknown; choose one of {', '.join(SCHEDULES)}")
        count = self.num_microbatches
        if count is not None and (not isinstance(count, int) or count < 1):
            raise ConfigError(f"num_microbatches={count!r}; a batch is divided into a number of 1 or more")
        if count is not None and count > 1 and self.schedule == "pipedream":
            raise ConfigError(
                f"num_microbatches={count}, but schedule=pipedream lets whole batches enter, several at a time; leave "
                f"it out, or set schedule=pipedream_2bw, 1f1b or gpipe"
            )
        if self.vertical_sync and self.schedule != "pipedream":
            raise ConfigError(
                f"vertical_sync=true, but schedule={self.schedule} reads one weight version on all stages anyway; "
                f"leave it out"
            )
        for name in ("vertical_sync", "recompute", "share_device"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; give true or false")
        if self.update not in get_args(Update):
            raise ConfigError(f"update={self.update} is unknown; choose one of {', '.join(get_args(Update))}")
        if self.update == "minibatch" and self.schedule != "pipedream":
            raise ConfigError(
                f"update=minibatch, but schedule={self.schedule} updates once for every batch, under any plan; leave "
                f"it out, or set schedule=pipedream"
            )
        if self.update == "minibatch" and self.vertical_sync:
            raise ConfigError(
                "update=minibatch and vertical_sync=true: stages with different replicas then count different updates, "
                "and have no version in common; set update=round"
            )
        checked_setting(self.topology)
        if self.load_data not in LOAD_DATA:
            raise ConfigError(f"load_data={self.load_data} is unknown; choose one of {', '.join(LOAD_DATA)}")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"timeout_s={self.timeout_s!r}; give the seconds after which a silent peer is an error")

    def microbatches(self, plan: Plan | None) -> int:
        """What each batch is divided into."""
        if self.schedule == "pipedream":
            return 1
        if self.num_microbatches is not None:
            return self.num_microbatches
        return 1 if plan is None else plan.round * len(plan.stages)

    def microbatches_expected(self, devices: int) -> int:
        """The same before there is a plan."""
        if self.schedule == "pipedream":
            return 1
        return devices if self.num_microbatches is None else self.num_microbatches

    def for_rank(self, plan: Plan | None, rank: int, *, accumulate: int = 1) -> ExecutorSettings:
        """One rank's part; without a plan it has the whole model, and nothing is ever late.

        `accumulate` are the batches that Lightning lets share an update, besides those of a round.
        """
        every = self.microbatches(plan)
        if plan is None:
            return ExecutorSettings("1f1b", 0, every, reading_of("1f1b", update_every=every), versioned=False)
        self._check_microbatches(plan, every)
        stage, place = next(
            ((index, stage.ranks.index(rank)) for index, stage in enumerate(plan.stages) if rank in stage.ranks),
            (IDLE, 0),
        )
        replicas = plan.stages[stage].replicas if stage != IDLE else 1
        averaged = 1
        if self.schedule == "pipedream":
            every = averaged = plan.round if self.update == "round" else replicas
        if self.schedule not in FLUSHING:  # those have applied everything when Lightning goes on
            every *= accumulate
        warmup = warmups(plan)[stage] if stage != IDLE else 0
        lag = warmups(plan)[0] * plan.replicas[0] if self.vertical_sync else None
        late = self.schedule == "pipedream_2bw" or self.vertical_sync
        return ExecutorSettings(
            schedule=self.schedule,
            warmup=warmup,
            update_every=every,
            reading=reading_of(self.schedule, update_every=every, vertical_sync_warmup=lag),
            versioned=late or (self.schedule == "pipedream" and (warmup > 0 or every > 1)),
            place=place,
            replicas=replicas,
            averaged=averaged,
        )

    def _check_microbatches(self, plan: Plan, count: int) -> None:
        if self.schedule == "pipedream":
            return
        least = least_accumulate(plan, self.schedule)
        if count < least:
            if least > max(plan.replicas):
                why = f"{plan.shape} keeps {least} in flight, for which two weight versions would not be enough"
            else:
                why = f"{plan.shape} has a stage with {least} replicas, some of which would have none"
            raise ConfigError(
                f"num_microbatches={count}, but schedule={self.schedule} over {why}; set num_microbatches={least}"
            )


def check_options(unknown: Mapping[str, object]) -> None:
    """LightningCLI hands on all that a base class would take, with its defaults."""
    of_base = signature(DDPStrategy).parameters
    for name, value in unknown.items():
        if name in of_base and value == of_base[name].default:
            continue
        ours = ", ".join(field.name for field in fields(PipelineSettings))
        raise ConfigError(f"{name}={value!r} is no option of PipeDreamStrategy; it has {ours}")


def split_points_of(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        raise ConfigError(f"split_points={names!r} is one text; give a list of module names, such as [{names}]")
    return None if names is None else tuple(names)
