"""What an outside launcher (torchrun, SLURM) has started, read from its environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass

from pl_pipe.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """One process's view of a job that was started from outside."""

    launcher: str
    """`torchrun` or `slurm`."""
    job: str
    """An id all processes of the job share."""
    rank: int
    local_world_size: int
    num_nodes: int

    @property
    def world_size(self) -> int:
        return self.local_world_size * self.num_nodes


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """The launch this process belongs to, or None where the run starts its own processes.

    SLURM is told apart as Lightning tells it: tasks are counted, and the job is not an interactive shell (named `bash`
    or `interactive`), in which users start processes themselves.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        local = _number(environ, "LOCAL_WORLD_SIZE")
        world = _number(environ, "WORLD_SIZE")
        return Launch(
            launcher="torchrun",
            job=environ["TORCHELASTIC_RUN_ID"],
            rank=_number(environ, "RANK"),
            local_world_size=local,
            num_nodes=_nodes(world, local),
        )
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        world, nodes = _number(environ, "SLURM_NTASKS"), _number({"SLURM_NNODES": "1", **environ}, "SLURM_NNODES")
        if world % nodes:
            raise ConfigError(
                f"SLURM started {world} tasks on {nodes} nodes, which is not the same number on each; "
                f"ask for --ntasks-per-node"
            )
        return Launch(
            launcher="slurm",
            job=environ.get("SLURM_JOB_ID", "unknown"),
            rank=_number(environ, "SLURM_PROCID"),
            local_world_size=world // nodes,
            num_nodes=nodes,
        )
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name)
    if value is None or not value.isdigit():
        raise ConfigError(
            f"the launcher's variable {name} is {value!r}, not a number; start the job with torchrun or srun"
        )
    return int(value)


def _nodes(world: int, local: int) -> int:
    if local < 1 or world % local:
        raise ConfigError(
            f"torchrun started {world} processes in all and {local} on this node; "
            f"give every node the same --nproc-per-node"
        )
    return world // local
