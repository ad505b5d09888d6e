"""The ranks of a link probe: started on this machine, or joined where a launcher has started them.

probe_local      parent ──spawn──► rank 0 … rank n-1      watched; rank 0's report comes back by pipe
probe_launched   torchrun, srun ─► rank 0 … rank n-1      every rank calls it; rank 0 has the report
"""

import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store  # torch.distributed does not say it has them
from torch.distributed.rendezvous import rendezvous

from pl_pipe.cluster import Launch
from pl_pipe.errors import ConfigError, RunError
from pl_pipe.profiling.link_probe import PAIR_BUDGET_S, REPEATS, SIZES_BYTES, TIMEOUT_S, Progress, measure_links
from pl_pipe.profiling.link_report import LinkReport
from pl_pipe.profiling.link_timing import Effort
from pl_pipe.profiling.watched_ranks import OnStep, first_line, run_watched

_CUDA = ("cuda", "gpu")
_probes = count()  # a job may probe again, through the same store


@dataclass(frozen=True)
class Means:
    """What messages are sent by, and from where."""

    backend: str
    device: str
    remark: str = ""
    """Why it is not what was asked for."""


def probe_local(
    ranks: int,
    *,
    backend: str | None = None,
    device: str = "cpu",
    sizes: Sequence[int] = SIZES_BYTES,
    repeats: int = REPEATS,
    pair_budget_s: float = PAIR_BUDGET_S,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
    on_step: OnStep | None = None,
) -> LinkReport:
    """Starts `ranks` processes on this machine and measures the links between them.

    No process is left when this returns or raises. `timeout_s` is the longest time without any progress. `on_step`, a
    function that can be pickled, is called in each process before each step, with its rank and what it is about to do.
    """
    _check_ranks(ranks)
    effort = Effort(tuple(sizes), repeats, pair_budget_s)  # refused here rather than in every rank
    means = choose_means(device, local_ranks=ranks, cuda_devices=torch.cuda.device_count(), backend=backend)
    with tempfile.TemporaryDirectory(prefix="pl_pipe_probe_") as folder:
        task = LocalProbe(ranks, means, effort, timeout_s, Path(folder) / "store")
        report = run_watched(task, ranks, name="link probe", timeout_s=timeout_s, progress=progress, on_step=on_step)
    return replace(report, remark=means.remark)


def probe_launched(
    launch: Launch,
    *,
    backend: str | None = None,
    device: str = "cpu",
    sizes: Sequence[int] = SIZES_BYTES,
    repeats: int = REPEATS,
    pair_budget_s: float = PAIR_BUDGET_S,
    timeout_s: float = 2 * TIMEOUT_S,
    progress: Progress | None = None,
) -> LinkReport | None:
    """Measures the links of the job that `launch` describes. Every rank calls it; rank 0 gets the report, others None.

    `timeout_s` is how long a rank waits for the others, at the start or in any step.
    """
    _check_ranks(launch.world_size)
    if dist.is_initialized():
        raise RunError("the job has a process group already; call measure_links in it")
    gpus = torch.cuda.device_count()
    means = choose_means(device, local_ranks=launch.local_world_size, cuda_devices=gpus, backend=backend)
    if means.device == "cuda":
        torch.cuda.set_device(launch.rank % launch.local_world_size)
    try:
        store = _launched_store(launch, timeout_s)
        with (
            _single_thread(),
            _group(store, launch.rank, launch.world_size, backend=means.backend, timeout_s=timeout_s),
        ):
            report = measure_links(
                sizes=sizes,
                repeats=repeats,
                device=means.device,
                pair_budget_s=pair_budget_s,
                timeout_s=timeout_s,
                progress=progress if launch.rank == 0 else None,
            )
    except RuntimeError as error:  # torch's own, which does not say that another rank is the cause
        raise RunError(
            f"the link probe failed on rank {launch.rank} of {launch.world_size}: {first_line(error)}; if that is a "
            f"lost connection, look for the rank that ended first"
        ) from error
    return replace(report, remark=means.remark) if launch.rank == 0 else None


def choose_means(device: str, *, local_ranks: int, cuda_devices: int, backend: str | None = None) -> Means:
    """NCCL where every rank of a machine has a CUDA device of its own; else gloo, from host memory."""
    if device not in ("cpu", *_CUDA):
        raise ConfigError(f"device={device} cannot be probed; choose cpu or cuda")
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"backend={backend} cannot be probed; choose gloo or nccl, or leave it out")
    if device == "cpu":
        if backend == "nccl":
            raise ConfigError("backend=nccl cannot send from device=cpu; choose device=cuda or backend=gloo")
        return Means("gloo", "cpu")
    if cuda_devices == 0:
        raise ConfigError(f"device={device}, but torch sees no CUDA device here; set trainer.accelerator=cpu")
    if local_ranks <= cuda_devices and backend != "gloo":
        return Means("nccl", "cuda")
    if backend == "nccl":
        raise ConfigError(
            f"backend=nccl needs a CUDA device for each rank, and this machine has {cuda_devices} for {local_ranks} "
            f"ranks; start fewer ranks, or leave the backend out"
        )
    why = "gloo was asked for" if backend else f"{local_ranks} ranks share {cuda_devices} CUDA device(s)"
    return Means("gloo", "cpu", f"{why}: measured with gloo between tensors in host memory, not with NCCL")


def slurm_address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Host and port of rank 0 in a SLURM job, by the rule Lightning follows: the first node, a port from the job id."""
    nodes, job = environ.get("SLURM_NODELIST", ""), environ.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdigit():
        raise ConfigError(
            f"SLURM_NODELIST={nodes!r} and SLURM_JOB_ID={job!r} do not say where rank 0 is; "
            f"set MASTER_ADDR and MASTER_PORT"
        )
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes)  # node[07-09,12],other -> node07,other
    return re.split(r"[ ,]", first)[0], str(15000 + int(job[-4:]))


@dataclass(frozen=True)
class LocalProbe:
    """What each process of `probe_local` does; pickled on its way there."""

    ranks: int
    means: Means
    effort: Effort
    timeout_s: float
    store: Path
    """A file the ranks meet through: there is no port to race for."""

    def __call__(self, rank: int, progress: Progress) -> LinkReport:
        torch.set_num_threads(1)
        if self.means.device == "cuda":
            torch.cuda.set_device(rank)
        store = FileStore(str(self.store), self.ranks)
        patience_s = 2 * self.timeout_s  # the parent is to notice first, since it can name the rank
        with _group(store, rank, self.ranks, backend=self.means.backend, timeout_s=patience_s):
            return measure_links(
                sizes=self.effort.sizes_bytes,
                repeats=self.effort.repeats,
                device=self.means.device,
                pair_budget_s=self.effort.budget_s,
                timeout_s=patience_s,
                progress=progress,
            )


def _check_ranks(ranks: int) -> None:
    if ranks < 2:
        raise ConfigError(f"{ranks} rank(s) have no link to measure; set trainer.devices=2")


@contextmanager
def _group(store: Store, rank: int, ranks: int, *, backend: str, timeout_s: float) -> Iterator[None]:
    """A default process group, for as long as the block runs."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _launched_store(launch: Launch, timeout_s: float) -> Store:
    """The store of a launched job (`env://`), under a name of its own: a later process group finds nothing stale."""
    if launch.launcher == "slurm" and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        address, port = slurm_address(os.environ)
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", port)
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(f"pl_pipe_probe_{next(_probes)}", store)


@contextmanager
def _single_thread() -> Iterator[None]:
    """Keeps torch's thread pool from taking the cores that the network needs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
