"""Ghosts that a module keeps in its own attributes, where a step has left them. Pipe -> *this* -> the model.

A module that makes a table when it is first called, or keeps a mask, does so on ranks that do not compute it too: they
keep a ghost, which must not be there when the rank needs the numbers.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, MutableMapping
from typing import Any, TypeAlias

import torch

from pl_pipe.stages.model_memory import NOT_A_STEPS
from pl_pipe.tensors.ghosts import state_home, unsettle, value_of
from pl_pipe.tensors.trees import map_tensors, tensors_in

_SHARED = (torch.Tensor, list, tuple, dict)

Kept: TypeAlias = dict[tuple[str, str], dict[int, torch.Tensor]]
"""By owner and attribute: tensors by their place among those of its value."""


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


def kept_by_steps(owners: Mapping[str, Any], stage: int, *, most_bytes: int | None = None) -> Kept:
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
            if known is None or tensor.is_meta or state_home(tensor) is not None or known.home != stage:
                continue
            own[place] = tensor.detach().cpu()
            unsettle(tensor)
        if own:
            found[owner, name] = own
    return found


def take_over(owners: Mapping[str, Any], kept: Kept, device: torch.device) -> None:
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
            and (tensor.is_meta or value_of(tensor) is not None)
        }
        if ghosts:
            vars(owners[owner])[name] = _exchanged(value, ghosts)


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
