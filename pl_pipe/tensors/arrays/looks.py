"""Questions about an array, answered as one variant would answer them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pl_pipe.tensors.arrays.marks import is_array, mark
from pl_pipe.tensors.ghosts.kinds import property_name


def look(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_array(args[0]):
        return function(*args, **kwargs)  # `shared.data = array` and the like are writes
    answer = _ANSWERS.get(name)
    if answer is None:
        return function(*args, **kwargs)
    if name == "__set__" and property_name(function) != "data":
        return function(*args, **kwargs)
    return answer(function, *args, **kwargs)


def _property(function: Callable[..., Any], array: Tensor, *rest: Any) -> Any:
    name = property_name(function)
    if name == "shape":
        return array.shape[1:]
    if name == "ndim":
        return array.ndim - 1
    if name == "nbytes":
        return array[0].nbytes
    found = function(array, *rest)
    return mark(found) if name in ("grad", "_base") and isinstance(found, Tensor) else found


def _put(function: Callable[..., Any], array: Tensor, value: Any) -> None:
    """`parameter.data = …`: into the memory of which the variants' own are views."""
    given = value if is_array(value) else value.expand(array.shape[0], *value.shape)
    if given.shape == array.shape and given.dtype == array.dtype and given.device == array.device:
        array.data.copy_(given.detach())
    else:
        function(array, mark(given.clone()))


def _size(_: Callable[..., Any], array: Tensor, dim: int | None = None) -> Any:
    return array.shape[1:] if dim is None else array.shape[1:][dim]


def _stride(_: Callable[..., Any], array: Tensor, dim: int | None = None) -> Any:
    return array.stride()[1:] if dim is None else array.stride()[1:][dim]


def _rank(_: Callable[..., Any], array: Tensor) -> int:
    return array.ndim - 1


def _count(_: Callable[..., Any], array: Tensor) -> int:
    return array[0].numel()


def _length(_: Callable[..., Any], array: Tensor) -> int:
    if array.ndim == 1:
        raise TypeError("len() of a 0-d tensor")
    return array.shape[1]


def _is_contiguous(_: Callable[..., Any], array: Tensor, memory_format: Any = torch.contiguous_format) -> bool:
    return array[0].is_contiguous(memory_format=memory_format)


def _is_same_size(_: Callable[..., Any], array: Tensor, other: Tensor) -> bool:
    return array.shape[1:] == (other.shape[1:] if is_array(other) else other.shape)


def _self(function: Callable[..., Any], array: Tensor, *args: Any, **kwargs: Any) -> Any:
    out = function(array, *args, **kwargs)
    return mark(out) if isinstance(out, Tensor) else out


def _register_hook(function: Callable[..., Any], array: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The user's hook sees the gradients one variant at a time."""

    def of_all(gradient: Tensor) -> Tensor:
        seen = [(part, hook(part)) for part in gradient.unbind(0)]
        return torch.stack([part if replaced is None else replaced for part, replaced in seen])

    return function(array, of_all)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "__get__": _property,
    "__set__": _put,
    "size": _size,
    "stride": _stride,
    "dim": _rank,
    "ndimension": _rank,
    "numel": _count,
    "nelement": _count,
    "__len__": _length,
    "is_contiguous": _is_contiguous,
    "is_same_size": _is_same_size,
    "requires_grad_": _self,
    "register_hook": _register_hook,
}
