"""Ghosts that a module keeps in its own attributes, where a step has left them. Pipe -> *this* -> the model.

A module that makes a table when it is first called, or keeps a mask, does so on ranks that do not compute it too: they
keep a ghost, which must not be there when the rank needs the numbers.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch
from torch import nn

from pl_pipe.stages.model_memory import NOT_A_STEPS
from pl_pipe.tensors.ghosts import state_home, unsettle, value_of
from pl_pipe.tensors.lineage import storage_key
from pl_pipe.tensors.trees import map_tensors, tensors_in

_SHARED = (torch.Tensor, list, tuple, dict)
_LIBRARIES = ("builtins", "lightning", "pytorch_lightning", "torch", "pl_pipe")

Kept: TypeAlias = dict[tuple[str, str], dict[int, torch.Tensor]]
"""By owner and attribute: tensors by their place among those of its value."""

Written: TypeAlias = dict[int, tuple[int, object]]
"""By the key of memory: the stage that wrote to it in a hook, perhaps through a view."""


def without_ghosts(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Of the attributes that hold ghosts, those that were set since stand as before; from dictionaries that are the
    same as before, the entries go. What a module counts or sets besides stays, and so do tensors with numbers."""
    for name, value in list(attributes.items()):
        if name in NOT_A_STEPS:  # other stages' parameters are ghosts by design, and restored by their owners
            continue
        if name in before and value is before[name]:
            _drop_entries(value)
        elif _has_ghost(value):
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def holders_besides(owners: Mapping[str, Any], known: Container[nn.Module], *, depth: int = 2) -> dict[str, Any]:
    """What else may hold values: other modules (a copy of the model), and objects of the user's, among attributes.

    By names that are alike on all ranks.
    """
    found: dict[str, Any] = {}
    for owner, thing in owners.items():
        for name, value in list(vars(thing).items()):
            if name in NOT_A_STEPS:
                continue
            held = value if type(value) in (list, tuple) else value.values() if type(value) is dict else (value,)
            for place, item in enumerate(held):
                where = f"{owner}.{name}.{place}"
                if isinstance(item, nn.Module) and item not in known:
                    for path, part in item.named_modules():
                        found |= {f"{where}.{path}": part, f"weights of {where}.{path}": _Weights(part)}
                elif hasattr(item, "__dict__") and type(item).__module__.partition(".")[0] not in _LIBRARIES:
                    found[where] = item
                    if depth > 1:
                        found |= holders_besides({where: item}, known, depth=depth - 1)
    return found


class _Weights:
    """Of a module that is no part of the model."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters, self.buffers = module._parameters, module._buffers


def kept_by_steps(owners: Mapping[str, Any], stage: int, written: Written, *, most_bytes: int | None = None) -> Kept:
    """What modules and callbacks keep of this stage's values, with numbers, for the other ranks.

    Afterwards the tensors show no values here either: all ranks will have them.
    """
    found: Kept = {}
    for owner, name, value in _attributes(owners):
        tensors = tensors_in(value)
        if most_bytes is not None and sum(tensor.nbytes for tensor in tensors) > most_bytes:
            continue
        own: dict[int, torch.Tensor] = {}
        for place, tensor in enumerate(tensors):
            known = value_of(tensor)
            home = _written_at(tensor, written) if known is None else known.home
            if tensor.is_meta or state_home(tensor) is not None or home != stage:
                continue
            own[place] = tensor.detach().cpu()
            unsettle(tensor)
            written.pop(storage_key(tensor), None)
        if own:
            found[owner, name] = own
    return found


def _written_at(tensor: torch.Tensor, written: Written) -> int | None:
    return written[storage_key(tensor)][0] if storage_key(tensor) in written else None


def take_over(owners: Mapping[str, Any], kept: Kept, device: torch.device, written: Written) -> None:
    """Puts what another rank keeps in the place of its ghosts."""
    for owner, name, value in _attributes(owners, kept):
        theirs = kept.get((owner, name))
        if theirs is None:
            continue
        ghosts = {
            id(tensor): theirs[place].to(device)
            for place, tensor in enumerate(tensors_in(value))
            if place in theirs
            and theirs[place].shape == tensor.shape
            and (tensor.is_meta or value_of(tensor) is not None or storage_key(tensor) in written)
        }
        if ghosts:
            kind = type(owners[owner])
            vars(owners[owner])[name] = _exchanged(value, ghosts)
            if kind is _Weights and name == "parameters":
                value.update({key: _parameter(one) for key, one in value.items()})


def _attributes(
    owners: Mapping[str, Any], only: Container[tuple[str, str]] | None = None
) -> Iterator[tuple[str, str, Any]]:
    for owner, thing in owners.items():
        for name, value in list(vars(thing).items()):
            wanted = only is None or (owner, name) in only
            if wanted and name not in NOT_A_STEPS and isinstance(value, _SHARED):
                yield owner, name, value


def _exchanged(value: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """With other tensors in the place of some; lists and dictionaries stay the same ones, for who else has them."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if type(value) is list:
        value[:] = [_exchanged(item, others) for item in value]
        return value
    if isinstance(value, dict) and type(value) in (dict, defaultdict):
        value.update({key: _exchanged(item, others) for key, item in value.items()})
        return value
    return map_tensors(value, lambda tensor: others.get(id(tensor), tensor))


def _parameter(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)


def settled(attributes: Mapping[str, Any]) -> None:
    """Tensors with numbers show no values of steps any more."""
    for name, value in attributes.items():
        if name not in NOT_A_STEPS:
            for tensor in tensors_in(value):
                unsettle(tensor)


def _drop_entries(value: Any) -> None:
    if not isinstance(value, MutableMapping):
        return
    for key, entry in list(value.items()):
        if isinstance(entry, MutableMapping):
            _drop_entries(entry)
        elif _has_ghost(entry) and not isinstance(entry, list):  # what steps append to stays, as where an attribute
            del value[key]


def _has_ghost(value: Any) -> bool:
    return any(tensor.is_meta for tensor in tensors_in(value))
