"""Puts a model's state together from the ranks that own its parts, name by name, so that no rank holds it twice."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pl_pipe.tensors.ghosts import home_of, settle


class StateOwners:
    """Which rank has the numbers of each parameter and buffer; all ranks must ask at the same point."""

    def __init__(self, model: nn.Module, homes: Mapping[str, int], ranks: Sequence[int]) -> None:
        """
        Args:
            homes: the stage of each name of the model's state; names that are absent are every rank's own.
            ranks: the one of each stage that answers for it.
        """
        self._model = model
        self._homes, self._ranks = dict(homes), list(ranks)
        self._rank = dist.get_rank()
        self._twins = _first_names(model)
        self._known = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}

    def on_first_rank(self) -> dict[str, Any]:
        """The model's state dictionary: whole on rank 0, elsewhere without what other ranks own."""
        self._follow_buffers()
        state = self._model.state_dict()
        found: dict[str, Any] = OrderedDict()  # as torch's, with its versions of modules
        found._metadata = getattr(state, "_metadata", {})  # type: ignore[attr-defined]
        for name, value in state.items():
            owner, twin = self._owner(name), self._twins.get(name, name)
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
        """The numbers of all state that some rank lacks, on every rank, by its first name in the model.

        What steps and hooks have added to the model since is rank 0's, on every rank.
        """
        self._follow_buffers()
        found: dict[str, Tensor] = {}
        state = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        added = [{name: tensor.detach().cpu() for name, tensor in state.items() if name not in self._known}]
        dist.broadcast_object_list(added, 0)
        for name, value in added[0].items():
            if name in state and state[name].shape == value.shape:
                state[name].data.copy_(value)
        for name, tensor in state.items():
            owner = self._owner(name)
            if owner is None:
                continue
            mine = owner == self._rank
            buffer = tensor.detach().cpu().contiguous() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.broadcast(buffer, owner)
            found[name] = buffer
        return found

    def _owner(self, name: str) -> int | None:
        return self._ranks[self._homes[name]] if name in self._homes else None

    def _follow_buffers(self) -> None:
        """A buffer that a step assigned anew has its numbers where those were computed, which may be another stage.

        Rank 0 tells, which runs every step to its end: one that left before knows nothing of it, and has old numbers.
        """
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if name in self._homes}
        homes = {name: home_of(buffer) for name, buffer in buffers.items()}
        moved = {name: home for name, home in homes.items() if home is not None and home != self._homes[name]}
        told = [moved]
        dist.broadcast_object_list(told, 0)
        self._homes.update(told[0])
        for name in told[0]:
            if homes[name] != self._homes[name] and not buffers[name].is_meta:
                module, _, own_name = name.rpartition(".")
                ghost = torch.empty_like(buffers[name], device="meta")
                self._model.get_submodule(module)._buffers[own_name] = settle(ghost, self._homes[name])


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a tensor that has several, the first one."""
    names: dict[int, str] = {}
    first: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            first[name] = names.setdefault(id(tensor), name)
    return first
