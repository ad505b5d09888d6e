"""Operations that name dimensions: on an array each of them stands one further to the right.

Dimensions counted from the end stay as they are. What a table cannot say (a reduction over everything, dimensions given
in another form) is left to vmap by answering NotImplemented.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_pipe.tensors.arrays.layout import as_array
from pl_pipe.tensors.arrays.marks import is_array, mark, mark_all, mark_copied_view, shared


class _Place(NamedTuple):
    """Where a function takes a dimension; `default` None: without it the function does something else."""

    position: int
    keyword: str
    default: int | None = None


_DIM = _Place(1, "dim")
# fmt: off
_PLACES: dict[str, tuple[_Place, ...]] = {
    **dict.fromkeys((
        "softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp", "argmax", "argmin", "max", "min",
        "amax", "amin", "std", "var", "logsumexp", "all", "any", "unsqueeze", "squeeze", "select", "narrow",
        "index_select", "unflatten", "median", "gather", "prod", "mean", "sum", "nansum", "unsqueeze_",
        "cummax", "cummin",
    ), (_DIM,)),
    "argsort": (_Place(1, "dim", -1),),
    "sort": (_Place(1, "dim", -1),),
    "topk": (_Place(2, "dim", -1),),
    "glu": (_Place(1, "dim", -1),),
    "unbind": (_Place(1, "dim", 0),),
    "chunk": (_Place(2, "dim", 0),),
    "split": (_Place(2, "dim", 0),),
    "tensor_split": (_Place(2, "dim", 0),),
    "flatten": (_Place(1, "start_dim", 0), _Place(2, "end_dim", -1)),
    "transpose": (_DIM._replace(keyword="dim0"), _Place(2, "dim1")),
    "swapaxes": (_DIM._replace(keyword="axis0"), _Place(2, "axis1")),
    "swapdims": (_DIM._replace(keyword="dim0"), _Place(2, "dim1")),
    "movedim": (_DIM._replace(keyword="source"), _Place(2, "destination")),
    "normalize": (_Place(2, "dim", 1),),
    "roll": (_Place(2, "dims"),),
    "repeat_interleave": (_Place(2, "dim"),),
}
# fmt: on
_FULL = ("mean", "sum", "nansum")  # without a dimension: over all that are seen
_TWO_TENSORS = ("gather", "index_select", "repeat_interleave")
_OF_NUMBERS = ("unsqueeze", "unsqueeze_")  # right for a single number too, whose dimension 0 would be the variants'


def shifted(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> Any:
    rule = _RULES.get(name)
    if rule is not None:
        return rule(function, width, *args, **kwargs)
    places = _PLACES.get(name)
    array = args[0] if args else None
    if places is None or not isinstance(array, Tensor):
        return NotImplemented
    if not is_array(array):
        if name != "gather":
            return NotImplemented
        array = as_array(array, width)
    if kwargs.get("out") is not None or (array.ndim == 1 and name not in _OF_NUMBERS):
        return NotImplemented
    others = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)]
    if others:
        if name == "gather":
            args = (array, *(as_array(value, width) if isinstance(value, Tensor) else value for value in args[1:]))
            kwargs = {key: as_array(value, width) if shared(value) else value for key, value in kwargs.items()}
        elif name not in _TWO_TENSORS or any(is_array(other) for other in others):
            return NotImplemented
    given, named = list(args), dict(kwargs)
    for place in places:
        if place.position < len(given):
            dim = given[place.position] = _shift(given[place.position])
        elif place.keyword in named:
            dim = named[place.keyword] = _shift(named[place.keyword])
        elif place.default is not None:
            dim = named[place.keyword] = _shift(place.default)
        elif name in _FULL and "axis" not in named:
            dim = named["dim"] = tuple(range(1, array.ndim))
        else:
            return NotImplemented
        if dim is NotImplemented:
            return NotImplemented
    return mark_all(function(*given, **named))


def _shift(dim: Any) -> Any:
    if isinstance(dim, bool) or dim is None:
        return NotImplemented
    if isinstance(dim, int):
        return dim if dim < 0 else dim + 1
    if isinstance(dim, tuple | list) and dim and all(isinstance(one, int) for one in dim):
        return type(dim)(one if one < 0 else one + 1 for one in dim)
    return NotImplemented


def _sizes(sizes: tuple[Any, ...]) -> tuple[int, ...] | None:
    """`x.view(2, -1)` and `x.view((2, -1))` alike; None where these are no sizes."""
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return sizes if all(isinstance(size, int) for size in sizes) else None


def _view(function: Callable[..., Any], width: int, array: Any, *sizes: Any, **kwargs: Any) -> Any:
    """A view where strides allow, otherwise a copy that must not be written to."""
    given = _sizes(sizes) if sizes else _sizes((kwargs.get("shape", kwargs.get("size", (None,))),))
    if given is None or not is_array(array):
        return NotImplemented
    if -1 in given and 0 in array.shape:
        return NotImplemented
    if function is Tensor.view:
        try:
            return mark(array.view(width, *given))
        except RuntimeError:
            if prod(array.shape[1:]) % max(1, abs(prod(given))):
                return NotImplemented  # the user's mistake: let torch tell it
            copied = array.reshape(width, *given)
            mark_copied_view(copied)
            return mark(copied)
    return mark(array.reshape(width, *given))


def _view_as(function: Callable[..., Any], width: int, array: Any, other: Tensor) -> Any:
    sizes = other.shape[1:] if is_array(other) else other.shape
    view = Tensor.view if function is Tensor.view_as else Tensor.reshape
    return _view(view, width, array, tuple(sizes)) if is_array(array) else view(array, sizes)


def _permute(_function: Callable[..., Any], _: int, array: Any, *dims: Any, **kwargs: Any) -> Any:
    given = _sizes(dims) if dims else _sizes((kwargs.get("dims", (None,)),))
    if given is None or not is_array(array):
        return NotImplemented
    seen = array.ndim - 1
    return mark(array.permute(0, *(dim % max(seen, 1) + 1 for dim in given)))


def _expand(_function: Callable[..., Any], width: int, array: Any, *sizes: Any, **kwargs: Any) -> Any:
    given = _sizes(sizes)
    if given is None or kwargs or not is_array(array):
        return NotImplemented
    missing = len(given) - (array.ndim - 1)
    if missing < 0:
        return NotImplemented
    return mark(array[(slice(None), *(None,) * missing)].expand(width, *given))


def _expand_as(function: Callable[..., Any], width: int, array: Any, other: Tensor) -> Any:
    sizes = tuple(other.shape[1:] if is_array(other) else other.shape)
    return _expand(function, width, array, *sizes) if is_array(array) else array.expand(sizes)


def _repeat(_function: Callable[..., Any], _: int, array: Any, *sizes: Any, **kwargs: Any) -> Any:
    given = _sizes(sizes)
    if given is None or kwargs or not is_array(array):
        return NotImplemented
    missing = max(0, len(given) - (array.ndim - 1))
    return mark(array[(slice(None), *(None,) * missing)].repeat(1, *given))


def _joined(
    function: Callable[..., Any], width: int, tensors: Sequence[Tensor], dim: Any = 0, *, out: Any = None, **kwargs: Any
) -> Any:
    """`cat` and `stack`: shared tensors among them are seen by every variant."""
    moved = _shift(dim)
    if moved is NotImplemented or out is not None or kwargs or not isinstance(tensors, tuple | list):
        return NotImplemented
    arrays = [as_array(tensor, width) for tensor in tensors]
    if function is not torch.stack and len({array.ndim for array in arrays}) > 1:
        return NotImplemented
    if function is not torch.stack and arrays[0].ndim == 1:
        return NotImplemented
    return mark(function(arrays, dim=moved))


def _reversed(_function: Callable[..., Any], _: int, array: Any) -> Any:
    """`x.T`: all dimensions that are seen, in reverse."""
    return mark(array.permute(0, *range(array.ndim - 1, 0, -1)))


def _matrices(function: Callable[..., Any], _: int, array: Any) -> Any:
    return mark(function(array)) if array.ndim > 2 else NotImplemented


def _contiguous(_function: Callable[..., Any], _: int, array: Any, **kwargs: Any) -> Any:
    """The same tensor where one variant's part is contiguous already, else a copy: as for one variant."""
    if kwargs or not is_array(array):
        return NotImplemented
    return array if array[0].is_contiguous() else mark(array.contiguous())


def _flip(_function: Callable[..., Any], _: int, array: Any, *dims: Any, **kwargs: Any) -> Any:
    given = _sizes(dims)
    if given is None or kwargs or not is_array(array):
        return NotImplemented
    if not dims:  # `reversed(x)`
        return mark(array.flip(1)) if array.ndim > 1 else array
    return mark(array.flip([dim if dim < 0 else dim + 1 for dim in given]))


_RULES: dict[str, Callable[..., Any]] = {
    "view": _view,
    "reshape": _view,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "permute": _permute,
    "expand": _expand,
    "expand_as": _expand_as,
    "repeat": _repeat,
    "cat": _joined,
    "concat": _joined,
    "concatenate": _joined,
    "stack": _joined,
    "T": _reversed,
    "mT": _matrices,
    "contiguous": _contiguous,
    "flip": _flip,
}
SHIFTED = frozenset(_RULES) | frozenset(_PLACES)
