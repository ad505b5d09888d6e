"""The options that say where a model is cut, and how many devices each stage has. user -> *options* -> plan choice."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import SupportsIndex

from pl_pipe.cluster import Cluster
from pl_pipe.errors import ConfigError
from pl_pipe.strategies.pipeline.run_cluster import LOCAL

AUTO = "auto"
"""The plan with the least time between mini-batches, replicated stages and data parallelism among them."""
STRAIGHT = "straight"
"""The best with one device a stage."""
BEST = "best"
"""Of `strategy=auto`: also one device alone, and a pipeline only where it is worth it."""
MADE = (AUTO, STRAIGHT, BEST)
"""Names of plans that are made here; any other is a file's."""


def check_plan_options(
    *, plan: str, split_points: Sequence[str] | None, replicas: Sequence[int] | None, cluster: str | Cluster = LOCAL
) -> None:
    """Refuses options that contradict each other, whatever the model and the devices."""
    if plan != AUTO:
        for name, value in (("split_points", split_points), ("replicas", replicas)):
            if value is not None:
                what = "where to cut" if name == "split_points" else "how many devices a stage has"
                raise ConfigError(f"plan={plan} and {name}={list(value)} each say {what}; leave one of them out")
    if plan not in MADE and cluster != LOCAL:
        raise ConfigError(
            f"plan={plan} was made for a cluster that stands in it, so cluster={cluster} would change nothing; leave "
            f"one of them out"
        )
    if replicas is None:
        return
    if not replicas or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in replicas):
        raise ConfigError(
            f"replicas={list(replicas)}; give each stage a number of devices of 1 or more, such as [3, 1]"
        )
    cuts = 0 if split_points is None else len(split_points)
    if len(replicas) == cuts + 1:
        return
    if split_points is None:
        raise ConfigError(
            f"replicas={list(replicas)} is for {len(replicas)} stages, but nothing says where they end; name "
            f"{len(replicas) - 1} module(s) with split_points, or leave replicas out and let plan=auto choose"
        )
    raise ConfigError(
        f"split_points={list(split_points)} makes {cuts + 1} stages, but replicas={list(replicas)} is for "
        f"{len(replicas)}; give one number for each stage"
    )


def check_devices(*, split_points: Sequence[str] | None, replicas: Sequence[int] | None, devices: int) -> None:
    """Refuses a plan by hand that is for more or fewer devices than there are."""
    if replicas is not None:
        if sum(replicas) != devices:
            raise ConfigError(
                f"replicas={list(replicas)} is for {sum(replicas)} devices, the trainer has {devices}; set "
                f"devices={sum(replicas)}, or numbers that add up to {devices}"
            )
        return
    stages = devices if split_points is None else len(split_points) + 1
    if split_points is None or stages == devices:
        return
    spread = f", or give stages more devices: replicas={[devices - stages + 1] + [1] * (stages - 1)}"
    raise ConfigError(
        f"split_points={list(split_points)} makes {stages} stages, the trainer has {devices} devices; set "
        f"devices={stages}, or name {devices - 1} modules{spread if stages < devices else ''}"
    )


def plan_of(plan: object) -> str:
    """A name or a path, as text."""
    if not isinstance(plan, str | os.PathLike):
        raise ConfigError(f"plan={plan!r}; give {AUTO}, {STRAIGHT} or the path of a plan.json")
    name = os.fspath(plan)
    if name not in MADE and not Path(name).suffix and not Path(name).exists():
        raise ConfigError(f"plan={name} is unknown; choose {AUTO} or {STRAIGHT}, or give the path of a plan.json")
    return name


def replicas_of(counts: object) -> tuple[int, ...] | None:
    """Whole numbers of any library become Python's; what is none stays, to be refused with the other options."""
    if counts is None:
        return None
    if isinstance(counts, str) or not isinstance(counts, Iterable):
        raise ConfigError(f"replicas={counts!r} is no list; give a number of devices for each stage, such as [3, 1]")
    return tuple(
        int(count) if isinstance(count, SupportsIndex) and not isinstance(count, bool) else count for count in counts
    )
