"""Which tensors are arrays, and what they show.

    physical   [M, N, C]     what is in memory: M variants
    logical       [N, C]     what the user's Python sees while the mode is on

A tensor without the mark is *shared*: every variant sees the same numbers (the batch, a causal mask).
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import TypeIs

_ARRAY = "_pl_pipe_array"
_MADE = "_pl_pipe_made"
_COPIED = "_pl_pipe_copied_view"

Rule = Callable[..., Any]
"""Called instead of a function, with its arguments; `NotImplemented` leaves them to the next way."""


class Array(Tensor):
    """Only for the type checker: a tensor that bears the mark."""


def is_array(value: Any) -> TypeIs[Array]:
    return isinstance(value, Tensor) and getattr(value, _ARRAY, False)


def shared(value: Any) -> bool:
    """A tensor whose numbers are the same for all variants."""
    return isinstance(value, Tensor) and not getattr(value, _ARRAY, False)


def mark(tensor: Tensor) -> Tensor:
    setattr(tensor, _ARRAY, True)
    return tensor


def mark_all(out: Any) -> Any:
    """Marks the tensors of what a function returned: one, or a (named) tuple or list of them."""
    if isinstance(out, Tensor):
        setattr(out, _ARRAY, True)
    elif isinstance(out, tuple | list):
        for item in out:
            mark_all(item)
    return out


def mark_made(tensor: Tensor) -> None:
    """The step made this shared tensor: nobody outside sees what becomes of it."""
    setattr(tensor, _MADE, True)


def is_made(tensor: Tensor) -> bool:
    return getattr(tensor, _MADE, False)


def mark_copied_view(tensor: Tensor) -> None:
    """The user asked for a view; this layout could only give a copy, so it must not be written to."""
    setattr(_owner(tensor), _COPIED, True)


def is_copied_view(tensor: Tensor) -> bool:
    """Or a view of one."""
    return getattr(_owner(tensor), _COPIED, False)


def _owner(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def rank(tensor: Tensor) -> int:
    """The number of dimensions that the user sees."""
    return tensor.ndim - 1 if is_array(tensor) else tensor.ndim


def arrays_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether any argument is an array; looks into lists and tuples."""
    for value in args:
        if isinstance(value, Tensor):
            if getattr(value, _ARRAY, False):
                return True
        elif isinstance(value, tuple | list) and arrays_among(tuple(value), {}):
            return True
    return bool(kwargs) and arrays_among(tuple(kwargs.values()), {})
