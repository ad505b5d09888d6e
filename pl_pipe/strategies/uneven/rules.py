"""The synchronizer that the settings name. UnevenSettings, Worker -> *make_rule* -> Synchronizer."""

from datetime import timedelta

import torch.distributed as dist

from pl_pipe.comm import DistributedSumming
from pl_pipe.comm.summing import PeerSumming
from pl_pipe.comm.synchronizers import (
    ADPSGD,
    AllReduce,
    Local,
    Matched,
    ModelAveraging,
    PairAveraging,
    PartialReduce,
    Synchronizer,
    Wave,
    Worker,
)
from pl_pipe.errors import ConfigError
from pl_pipe.runtime.gradient_averaging import GradientAveraging
from pl_pipe.strategies.uneven.settings import SYNCHRONIZERS, UnevenSettings


def make_rule(settings: UnevenSettings, worker: Worker, *, backend: str = "gloo") -> Synchronizer:
    """All ranks of the default process group must make theirs at the same point."""
    name = settings.synchronizer
    if name == "allreduce":
        return AllReduce(worker, GradientAveraging(_summing(worker, backend)))
    if name == "sma":
        return ModelAveraging(worker, _summing(worker, "gloo"), pull=settings.pull, every=settings.every)
    if name == "partial_reduce":
        return PartialReduce(worker, averaging=settings.averaging, alpha=settings.alpha, every=settings.every)
    if name == "ad_psgd" and settings.matching:
        return Matched(worker, seed=settings.seed, every=settings.every)
    if name == "ad_psgd":
        return ADPSGD(worker, seed=settings.seed, every=settings.every)
    if name == "pair":
        return PairAveraging(worker, seed=settings.seed, every=settings.every)
    if name == "wave":
        return Wave(worker, steps=settings.wave, servers=settings.servers)
    if name == "local":
        return Local(worker)
    raise ConfigError(f"synchronizer={name} is unknown; choose one of {', '.join(SYNCHRONIZERS)}")


def _summing(worker: Worker, backend: str) -> DistributedSumming:
    if worker.new_peers is not None:
        return PeerSumming(worker.peers(), timeout_s=worker.timeout_s)
    timeout = timedelta(seconds=worker.timeout_s)
    group = dist.new_group(list(worker.workers), backend=backend, timeout=timeout)
    return DistributedSumming(group, worker.workers, timeout_s=worker.timeout_s)
