"""Ghosts that a module keeps in its own attributes, where a step has left them. Pipe -> *this* -> the model.

A module that makes a table when it is first called, or keeps a mask, does so on ranks that do not compute it too: they
keep a ghost, which must not be there when the rank needs the numbers.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

from pl_pipe.stages.model_memory import NOT_A_STEPS
from pl_pipe.tensors.ghosts import value_of
from pl_pipe.tensors.trees import tensors_in


def without_ghosts(attributes: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Of the attributes that hold ghosts, those that were set since stand as before; from dictionaries that are the
    same as before, the entries go. What a module counts or sets besides stays."""
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


def _drop_entries(value: Any) -> None:
    if not isinstance(value, MutableMapping):
        return
    for key, entry in list(value.items()):
        if isinstance(entry, MutableMapping):
            _drop_entries(entry)
        elif _has_ghost(entry):
            del value[key]


def _has_ghost(value: Any) -> bool:
    return any(_is_ghost(tensor) for tensor in tensors_in(value))


def _is_ghost(tensor: Tensor) -> bool:
    return tensor.is_meta or value_of(tensor) is not None
