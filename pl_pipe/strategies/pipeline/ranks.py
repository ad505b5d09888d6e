"""What the ranks of a pipeline tell each other at drained points."""

import zlib
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from pl_pipe.errors import ConfigError, StageError
from pl_pipe.tensors.trees import map_tensors, tensors_in

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def share_metrics(trainer: L.Trainer) -> None:
    """Every rank has rank 0's metrics, so that all decide alike."""
    connector: Any = trainer._logger_connector
    metrics = None
    if trainer.is_global_zero:
        metrics = [map_tensors(dict(getattr(connector, name)), Tensor.cpu) for name in _METRICS]
    metrics = trainer.strategy.broadcast(metrics)
    if not trainer.is_global_zero:
        device = trainer.strategy.root_device
        for name, values in zip(_METRICS, metrics, strict=True):  # type: ignore[arg-type]
            getattr(connector, f"_{name}").update(map_tensors(values, lambda tensor: tensor.to(device)))


def refuse_other_processes(ranks: int) -> None:
    """Those of an earlier trainer with another number of devices."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() != ranks:
        raise ConfigError(
            f"the processes of this script were started by a trainer with devices={dist.get_world_size()}, and this "
            f"one has devices={ranks}; give the trainers of a script the same number, or each a script of its own"
        )


def of_all_ranks(content: Any) -> list[Any]:
    """What each rank gives, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, content)
    return everyone


def any_rank_has(flags: list[bool]) -> list[bool]:
    found = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in found.tolist()]


def check_same_batch(batch: Any) -> None:
    """All ranks must have the same data, or stages would work on parts of different batches; None has loaded none."""
    rank = differing_rank(batch)
    if rank is not None:
        raise StageError(
            f"rank {rank} has another batch than rank 0, but the stages of a pipeline work on one; make the data, and "
            f"what hooks do to a batch, alike on all ranks, for example with lightning.seed_everything before the data "
            f"are made"
        )


def differing_rank(batch: Any) -> int | None:
    """One that has other numbers in its batch than rank 0, on all ranks; None has loaded none."""
    mine = None if batch is None else [(tuple(tensor.shape), _checksum(tensor)) for tensor in tensors_in(batch)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((rank for rank, theirs in enumerate(everyone) if theirs not in (None, everyone[0])), None)


def check_same_lengths(what: str, batches: Any) -> None:
    """All ranks must take the same number of batches, or some would wait for what never comes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, batches)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise StageError(
                f"rank {rank} has {theirs} {what} batches and rank 0 has {everyone[0]}, but the stages of a pipeline "
                f"work on the same ones; make the data sets equally long on all ranks"
            )


def _checksum(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(content.view(torch.uint8).numpy().tobytes())
