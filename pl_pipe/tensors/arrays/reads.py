"""Numbers that Python reads from an array: `.item()`, `if tensor`, `float(tensor)`.

Python runs once for all variants, so what it reads must be the same number for each of them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pl_pipe.errors import FusionError
from pl_pipe.tensors.arrays.fallback import same_value
from pl_pipe.tensors.arrays.marks import is_array
from pl_pipe.tensors.arrays.messages import Layer, place, remedy

_TEXT = ("__repr__", "__format__")


def read(
    function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, width: int, layer: Layer
) -> Any:
    if name in _TEXT:
        return Tensor.__repr__(args[0])  # type: ignore[no-untyped-call]
    values = []
    for variant in range(width):
        named = {key: _part(value, variant) for key, value in kwargs.items()}
        values.append(function(*(_part(value, variant) for value in args), **named))
    if any(not same_value(values[0], value) for value in values[1:]):
        found = ", ".join(str(value) for value in values[:4]) + (", …" if width > 4 else "")
        raise FusionError(
            f"{place(layer)}: {name.strip('_')} reads numbers that differ between the variants ({found}), but "
            f"this code runs once for all of them; {remedy(layer)}"
        )
    return values[0]


def _part(value: Any, variant: int) -> Any:
    return value[variant] if is_array(value) else value
