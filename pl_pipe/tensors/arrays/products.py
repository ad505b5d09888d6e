"""Matrix products: the variants are one more batch dimension."""

from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from pl_pipe.tensors.arrays.elementwise import widened
from pl_pipe.tensors.arrays.marks import is_array, mark, rank

_MATRICES = frozenset({"matmul", "bmm", "mm", "__matmul__"})
PRODUCTS = _MATRICES | {"einsum"}


def product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) < 2:
        return NotImplemented
    if name == "einsum":
        return _einsum(*args)
    left, right = args
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or rank(left) < 2 or rank(right) < 2:
        return NotImplemented
    full = max(rank(left), rank(right))
    return mark(torch.matmul(widened(left, full), widened(right, full)))


def _einsum(equation: Any, *operands: Any) -> Any:
    """A letter of its own for the variants."""
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation or "..." in equation:
        return NotImplemented
    inputs, output = equation.replace(" ", "").split("->")
    letter = next((one for one in ascii_letters if one not in equation), None)
    if letter is None or any(not isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return NotImplemented
    lettered = [letter + term if is_array(operand) else term for term, operand in zip(terms, operands, strict=True)]
    return mark(torch.einsum(f"{','.join(lettered)}->{letter}{output}", *operands))
