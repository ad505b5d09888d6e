"""Operations that no table knows: vmap, and where it has no rule, one call a variant."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays.marks import is_array, mark, mark_all
from pl_pipe.tensors.arrays.messages import Layer, remedy
from pl_pipe.tensors.arrays.streams import Streams
from pl_pipe.tensors.operations import FREE_OUTPUTS, user_line


def vmapped(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function over all variants at once; raises where vmap has no rule for it."""
    flat, structure = tree_flatten((args, kwargs))
    places = [place for place, value in enumerate(flat) if is_array(value)]

    def call(*parts: Tensor) -> Any:
        given = list(flat)
        for place, part in zip(places, parts, strict=True):
            given[place] = part
        args_of_one, kwargs_of_one = tree_unflatten(given, structure)
        return function(*args_of_one, **kwargs_of_one)

    return mark_all(torch.vmap(call, randomness="different")(*(flat[place] for place in places)))


def per_variant(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    width: int,
    streams: Streams,
    name: str,
    in_place: bool = False,
    layer: Layer | None = None,
) -> Any:
    """One call a variant, the results put together; an in-place one writes to its first argument."""
    flat, structure = tree_flatten((args, kwargs))
    parts = {place: value.unbind(0) for place, value in enumerate(flat) if is_array(value)}
    if in_place:
        parts[0] = copies_of(flat[0])
    outs = []
    for variant in range(width):
        given = [parts[place][variant] if place in parts else value for place, value in enumerate(flat)]
        args_of_one, kwargs_of_one = tree_unflatten(given, structure)
        with streams.turn(variant):
            outs.append(function(*args_of_one, **kwargs_of_one))
    if in_place:
        return flat[0].copy_(torch.stack(parts[0]))
    return together(outs, name, layer)


def copies_of(array: Tensor) -> tuple[Tensor, ...]:
    """Each variant's part, to be written to: autograd takes a write to one slice for a write to all of them."""
    return tuple(part.clone() for part in array.unbind(0))


def together(outs: Sequence[Any], name: str, layer: Layer | None = None) -> Any:
    """The variants' results as one of arrays; what is no tensor must be the same for all."""
    flats = [tree_flatten(out) for out in outs]
    if any(structure != flats[0][1] for _, structure in flats):
        raise FusionError(
            f"{user_line()}: {name} returns values of different structure for the variants; {remedy(layer)}"
        )
    free = FREE_OUTPUTS.get(name, ())
    joined = [
        values[0] if place in free else _joined(values, name, layer)
        for place, values in enumerate(zip(*(flat for flat, _ in flats), strict=True))
    ]
    return tree_unflatten(joined, flats[0][1])


def _joined(values: tuple[Any, ...], name: str, layer: Layer | None) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        if any(not same_value(first, value) for value in values[1:]):
            raise FusionError(
                f"{user_line()}: {name} gives {_few(values)} for the variants, which must be the same; {remedy(layer)}"
            )
        return first
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) > 1:
        raise FusionError(
            f"{user_line()}: {name} gives tensors of shapes {_few([list(value.shape) for value in values])} for the "
            f"variants, and an array has one shape; {remedy(layer)}"
        )
    return mark(stacked_as_laid_out(values))


def stacked_as_laid_out(values: Sequence[Tensor]) -> Tensor:
    """Side by side, each in the order in which it lies in memory: what is drawn for it later goes by that order."""
    first = values[0]
    if first.layout != torch.strided or first.is_contiguous() or len({value.stride() for value in values}) > 1:
        return torch.stack(tuple(values))
    order = sorted(range(first.ndim), key=first.stride, reverse=True)
    if not first.permute(order).is_contiguous():
        return torch.stack(tuple(values))
    whole = torch.stack([value.permute(order) for value in values])
    return whole.permute(0, *(1 + order.index(place) for place in range(first.ndim)))


def same_value(left: Any, right: Any) -> bool:
    """Equal, where NaN equals itself and arrays of any library may be compared."""
    try:
        equal = left == right
        if hasattr(equal, "all"):
            return bool((equal | ((left != left) & (right != right))).all())
        return bool(equal) or bool(left != left and right != right)
    except (RuntimeError, TypeError, ValueError):
        return False


def _few(values: Sequence[Any]) -> str:
    return ", ".join(str(value) for value in values[:4]) + (", …" if len(values) > 4 else "")
