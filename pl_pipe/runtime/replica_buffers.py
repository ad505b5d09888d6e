"""Buffers of a stage's replicas, made alike when the pipeline is drained. strategy -> *ReplicaBuffers* -> replicas.

Replicas see different batches. The statistics of batch norm become the mean of theirs; any other buffer becomes the
first replica's, since nobody but the user knows what it means. If it differed, that is said, once.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from pl_pipe.log import get_logger

log = get_logger(__name__)


class ReplicaBuffers:
    """One replica's part; all replicas must agree at the same points."""

    def __init__(
        self, module: nn.Module, names: Sequence[str], *, group: Any, ranks: Sequence[int], stage: int
    ) -> None:
        """
        Args:
            names: of the stage's buffers.
            ranks: those of the stage's replicas, which make up the group.
        """
        self._module, self._names = module, list(names)
        self._group, self._ranks, self._stage = group, list(ranks), stage
        self._unsaid = {name for name in self._names if not isinstance(_owner(module, name), _NormBase)}
        """Buffers that would be told of if they differed."""

    def agree(self) -> None:
        differs = {}
        for name in self._names:
            buffer = self._module.get_buffer(name)
            if buffer.is_meta:
                continue  # a step assigned it anew, and a later stage has it now
            if isinstance(_owner(self._module, name), _NormBase) and buffer.is_floating_point():
                dist.all_reduce(buffer, group=self._group)
                buffer /= len(self._ranks)
                continue
            before = buffer.clone() if name in self._unsaid else None
            dist.broadcast(buffer, self._ranks[0], group=self._group)
            if before is not None:
                differs[name] = not torch.equal(before.nan_to_num(), buffer.nan_to_num())
        self._tell(differs)

    def _tell(self, differs: dict[str, bool]) -> None:
        """By the first replica, which alone cannot know: its own buffers do not change."""
        if not differs:
            return
        found = torch.tensor(list(differs.values()), dtype=torch.int32)
        dist.all_reduce(found, group=self._group)
        for name, count in zip(differs, found.tolist(), strict=True):
            if not count:
                continue
            self._unsaid.discard(name)
            if dist.get_rank() == self._ranks[0]:
                log.warning(
                    "buffer %s of stage %d differs among its %d replicas, which see different batches; all go on with "
                    "the first one's. If it counts or averages over batches, plan the stage onto one device",
                    *(name, self._stage, len(self._ranks)),
                )


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])
