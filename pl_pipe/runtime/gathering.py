"""Puts a model's state together from the ranks that own its parts, name by name, so that no rank holds it twice."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class StateOwners:
    """Which rank has the numbers of each parameter and buffer; all ranks must ask at the same point."""

    def __init__(self, model: nn.Module, owners: Mapping[str, int]) -> None:
        """`owners` gives the rank for each name of the model's state; names that are absent are every rank's own."""
        self._model = model
        self._owners = dict(owners)
        self._rank = dist.get_rank()
        self._twins = _first_names(model)

    def on_first_rank(self) -> dict[str, Any]:
        """The model's state dictionary: whole on rank 0, elsewhere without what other ranks own."""
        state = self._model.state_dict()
        found: dict[str, Any] = OrderedDict()  # as torch's, with its versions of modules
        found._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
        for name, value in state.items():
            owner, twin = self._owners.get(name), self._twins.get(name, name)
            if owner is None or not isinstance(value, Tensor):
                found[name] = value
            elif twin != name:  # tied weights stay tied, and are sent once
                if twin in found:
                    found[name] = found[twin]
            elif owner == self._rank:
                found[name] = value
                if self._rank != 0:
                    dist.send(value.detach().cpu().contiguous(), 0)
            elif self._rank == 0:
                found[name] = torch.empty(value.shape, dtype=value.dtype)
                dist.recv(found[name], owner)
        return found

    def everywhere(self) -> dict[str, Tensor]:
        """The numbers of all state that some rank lacks, on every rank, by its first name in the model."""
        found: dict[str, Tensor] = {}
        state = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        for name, tensor in state.items():
            if name not in self._owners:
                continue
            mine = self._owners[name] == self._rank
            buffer = tensor.detach().cpu().contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.broadcast(buffer, self._owners[name])
            found[name] = buffer
        return found


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a tensor that has several, the first one."""
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            first[name] = names.setdefault(id(tensor), name)
    return first
