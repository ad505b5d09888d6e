"""The names of a run: its command, its directory, and who keeps its record.

Under torchrun or SLURM every rank runs the command itself, so the ranks must agree on one run directory, in which
rank 0 alone keeps Hydra's record. The configuration asks for these names through resolvers: `${command_name:}`,
`${run_stamp:}`, `${record_folder:}`.
"""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache

from omegaconf import OmegaConf

from pl_pipe.cluster import Launch
from pl_pipe.errors import ConfigError

_WAIT = timedelta(seconds=120)


def register_names(command: str, launch: Launch | None) -> None:
    """Defines the resolvers for this process."""
    rank = 0 if launch is None else launch.rank

    @cache
    def run_stamp() -> str:
        if launch is None:
            return _clock()
        step = os.environ.get("SLURM_STEP_ID", "0")  # a job may run several commands; a requeued one keeps its name
        return f"slurm-{launch.job}-{step}" if launch.launcher == "slurm" else _agreed_stamp(launch)

    resolvers: dict[str, Callable[[], str | None]] = {
        "command_name": lambda: command if rank == 0 else f"{command}_rank{rank}",
        "run_stamp": run_stamp,
        "record_folder": lambda: ".hydra" if rank == 0 else None,
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


def refuse_sweep(launch: Launch, arguments: list[str]) -> None:
    """A sweep starts its jobs one after another, each with processes of its own; an outside launch has one set."""
    if {"-m", "--multirun"} & set(arguments):
        raise ConfigError(
            f"-m sweeps cannot run inside one {launch.launcher} job; start pl-pipe -m by itself (it starts each job's "
            f"processes), or one {launch.launcher} job per setting"
        )


def _clock() -> str:
    return datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")


def _agreed_stamp(launch: Launch) -> str:
    """Rank 0's clock, told to all through torchrun's own store; a restarted job keeps its first one."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed has it, but does not say so to type checkers

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ConfigError(
            "this torchrun does not share its store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE is set); "
            "give all ranks the same hydra.run.dir=<folder>"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=_WAIT)
    key = f"pl_pipe/run_stamp/{launch.job}"
    if launch.rank == 0:
        return str(store.compare_set(key, "", _clock()).decode())
    return str(store.get(key).decode())
