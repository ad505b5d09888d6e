"""Nested values of arrays, and each variant's own: together for the forward, apart for everything else."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays import is_array, mark
from pl_pipe.tensors.arrays.fallback import stacked_as_laid_out
from pl_pipe.tensors.trees import map_tensors, tensors_in


def stacked(values: Sequence[Any]) -> Any:
    """One value for each variant, nested alike, as one of arrays; what is no tensor is the first one's."""
    found = [tensors_in(value) for value in values]
    if len({len(tensors) for tensors in found}) > 1:
        counts = ", ".join(str(len(tensors)) for tensors in found)
        raise FusionError(f"the variants' values hold {counts} tensors; they must be nested alike")
    joined = {id(of_all[0]): _stacked(of_all) for of_all in zip(*found, strict=True)}
    return map_tensors(values[0], lambda tensor: joined[id(tensor)])


def split(value: Any, width: int) -> list[Any]:
    """Each variant's part of a value of arrays; what all share is handed to each."""
    parts: dict[int, tuple[Tensor, ...]] = {}

    def part(tensor: Tensor, variant: int) -> Tensor:
        if not is_array(tensor):
            return tensor
        if id(tensor) not in parts:
            parts[id(tensor)] = tensor.unbind(0)
        return parts[id(tensor)][variant]

    split_up = [map_tensors(value, partial(part, variant=variant)) for variant in range(width)]
    hidden = [tensor for tensor in tensors_in(value) if is_array(tensor) and id(tensor) not in parts]
    if hidden:
        raise FusionError(
            f"a {type(value).__name__} holds tensors of all variants where they cannot be told apart; return tensors, "
            "lists, dictionaries or dataclasses of them"
        )
    return split_up


def holds_array(value: Any) -> bool:
    if isinstance(value, Tensor):
        return is_array(value)
    if isinstance(value, list | tuple):
        return any(holds_array(item) for item in value)
    return isinstance(value, dict) and any(holds_array(item) for item in value.values())


def _stacked(of_all: tuple[Tensor, ...]) -> Tensor:
    shapes = {tuple(value.shape) for value in of_all}
    if len(shapes) > 1:
        raise FusionError(f"the variants' tensors have shapes {sorted(shapes)}; an array has one shape")
    return mark(stacked_as_laid_out(of_all))
