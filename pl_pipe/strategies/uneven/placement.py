"""Which rank runs which stage of which pipeline. pipelines, placement -> *Placement* -> SDPipeStrategy.

                 pipeline 0   pipeline 1
    stage 0          1            3        rows are stages, columns pipelines, as in SD-Pipe's device lists;
    stage 1          0            2        numbers are the trainer's devices, counted through all nodes

Rank 0 reports, and has a last stage for that. Where the list puts device 0 elsewhere, rank 0 and the rank of that last
stage change devices; so the list is kept, and both must be on one node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pl_pipe.errors import ConfigError


@dataclass(frozen=True)
class Placement:
    """Ranks by stage and pipeline; the pipeline of rank 0 is the first."""

    stages: tuple[tuple[int, ...], ...]
    """Of each stage, the ranks in all pipelines."""
    devices: tuple[int, ...]
    """By rank."""

    @property
    def pipelines(self) -> int:
        return len(self.stages[0])

    @property
    def depth(self) -> int:
        return len(self.stages)

    def place(self, rank: int) -> tuple[int, int]:
        """The rank's pipeline and stage."""
        stage = next(number for number, ranks in enumerate(self.stages) if rank in ranks)
        return self.stages[stage].index(rank), stage

    def members(self, pipeline: int) -> tuple[int, ...]:
        """A pipeline's ranks, the last stage's first: this is how they are numbered among themselves."""
        return tuple(ranks[pipeline] for ranks in reversed(self.stages))


def placement_of(rows: Any, pipelines: int | None, *, devices: int, devices_a_node: int) -> Placement:
    """As the user lists it; without a list each pipeline has neighbouring devices, and one of them for each stage."""
    if rows is None:
        return _neighbours(2 if pipelines is None else pipelines, devices)
    found = _checked(rows, devices)
    if pipelines is not None and pipelines != len(found[0]):
        raise ConfigError(
            f"pipelines={pipelines}, but placement has {len(found[0])} columns, one for each pipeline; leave pipelines "
            f"out, or list as many"
        )
    _check_sizes(len(found[0]), len(found), devices)
    first = next(column for column in range(len(found[0])) if any(row[column] == 0 for row in found))
    columns = [first, *(column for column in range(len(found[0])) if column != first)]
    last = found[-1][first]
    if last // devices_a_node != 0:
        raise ConfigError(
            f"placement puts the last stage of device 0's pipeline on device {last}, which is on node "
            f"{last // devices_a_node}; rank 0 reports the loss, so let a pipeline that has its last stage on the "
            f"first node have device 0 too"
        )
    ranks = {last: 0, 0: last}
    by_rank = sorted(range(devices), key=lambda device: ranks.get(device, device))
    stages = tuple(tuple(ranks.get(row[column], row[column]) for column in columns) for row in found)
    return Placement(stages, tuple(by_rank))


def _neighbours(pipelines: int, devices: int) -> Placement:
    if not isinstance(pipelines, int) or isinstance(pipelines, bool) or pipelines < 2:
        raise ConfigError(
            f"pipelines={pipelines!r}; give a number of 2 or more, or choose strategy=pipedream, which is one"
        )
    if devices % pipelines:
        raise ConfigError(
            f"pipelines={pipelines} cannot share {devices} devices equally; set trainer.devices to a multiple of "
            f"{pipelines}"
        )
    depth = devices // pipelines
    _check_sizes(pipelines, depth, devices)
    stages = tuple(
        tuple(pipeline * depth + depth - 1 - stage for pipeline in range(pipelines)) for stage in range(depth)
    )
    return Placement(stages, tuple(range(devices)))


def _checked(rows: Any, devices: int) -> list[list[int]]:
    is_table = (
        isinstance(rows, Sequence)
        and not isinstance(rows, str)
        and rows
        and all(isinstance(row, Sequence) and not isinstance(row, str) and len(row) == len(rows[0]) for row in rows)
    )
    if not is_table:
        raise ConfigError(
            f"placement={rows!r}; give a list of stages, each a list of as many devices as there are pipelines, such "
            f"as [[0,2],[1,3]]"
        )
    found = [list(row) for row in rows]
    named = [device for row in found for device in row]
    if any(not isinstance(device, int) for device in named) or sorted(named) != list(range(devices)):
        raise ConfigError(
            f"placement={found} names the devices {named}; name each of 0 to {devices - 1} once, as many as the "
            f"trainer has"
        )
    return found


def _check_sizes(pipelines: int, depth: int, devices: int) -> None:
    if pipelines < 2:
        raise ConfigError("placement has one pipeline; list two columns or more, or choose strategy=pipedream")
    if depth < 2:
        raise ConfigError(
            f"{pipelines} pipelines over {devices} devices have one stage each; set trainer.devices={2 * pipelines} or "
            f"more, or choose strategy=partial_reduce, which has whole models"
        )
