"""The options of a pipeline, checked, and what they mean for one rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from pl_pipe.errors import ConfigError
from pl_pipe.partition import Plan
from pl_pipe.runtime.executor import ExecutorSettings
from pl_pipe.schedule import FLUSHING, SCHEDULES, least_accumulate, reading_of, warmups
from pl_pipe.strategies.pipeline_devices import check_transfers

_LAUNCH = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")


@dataclass(frozen=True)
class PipelineSettings:
    """How the batches of a DataLoader go through the stages.

    `pipedream` takes them as they are, one update each. The other schedules divide each into micro-batches that share
    its update, by default as many as there are stages.
    """

    plan: str = "auto"
    schedule: str = "pipedream"
    num_microbatches: int | None = None
    split_points: tuple[str, ...] | None = None
    vertical_sync: bool = False
    timeout_s: float = 300.0
    wire_dtype: str | None = None
    recompute: bool = False
    backend: str = "auto"
    share_device: bool = False

    def __post_init__(self) -> None:
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
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}; give the seconds after which a silent peer is an error")

    def microbatches(self, stages: int) -> int:
        """What each batch is divided into."""
        if self.schedule == "pipedream":
            return 1
        return stages if self.num_microbatches is None else self.num_microbatches

    def for_stage(self, plan: Plan | None, stage: int) -> ExecutorSettings:
        """One rank's part; without a plan the rank has the whole model, and nothing is ever late."""
        if plan is None:
            every = self.microbatches(1)
            return ExecutorSettings("1f1b", 0, every, reading_of("1f1b", update_every=every), versioned=False)
        every = self.microbatches(len(plan.stages))
        if self.schedule not in FLUSHING and every < least_accumulate(plan, self.schedule):
            least = least_accumulate(plan, self.schedule)
            raise ConfigError(
                f"num_microbatches={every}, but schedule={self.schedule} over {len(plan.stages)} stages keeps "
                f"{least} in flight, for which two weight versions would not be enough; set num_microbatches={least}"
            )
        warmup = warmups(plan)[stage] if stage >= 0 else 0
        lag = warmups(plan)[0] if self.vertical_sync else None
        late = self.schedule == "pipedream_2bw" or self.vertical_sync
        return ExecutorSettings(
            schedule=self.schedule,
            warmup=warmup,
            update_every=every,
            reading=reading_of(self.schedule, update_every=every, vertical_sync_warmup=lag),
            versioned=late or (warmup > 0 and self.schedule not in FLUSHING),
        )


def check_options(launch: Mapping[str, object]) -> None:
    """What is no option of ours must be Lightning's; a misspelt one would be swallowed without a word."""
    unknown = [name for name in launch if name not in _LAUNCH]
    if unknown:
        ours = ", ".join(field.name for field in fields(PipelineSettings))
        raise ConfigError(f"{unknown[0]}={launch[unknown[0]]!r} is no option of PipeDreamStrategy; it has {ours}")


def split_points_of(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(names, str):
        raise ConfigError(f"split_points={names!r} is one text; give a list of module names, such as [{names}]")
    return None if names is None else tuple(names)
