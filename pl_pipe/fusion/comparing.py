"""What makes modules variants of one another: the same structure; and where their settings differ.

A module whose own attributes (a dropout probability, a slope, a flag) differ cannot run once for all: it runs once a
variant, unless a rule knows what to do with the difference. The root is the exception: there the attributes that differ
(a learning rate) are mostly not the forward's, so reading one in the forward is what is refused.
"""

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pl_pipe.errors import FusionError

_SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def check_alike(variants: Sequence[nn.Module]) -> None:
    """Refuses modules that are not of one architecture."""
    if not variants:
        raise FusionError("an array needs at least one variant; none was given")
    if len({id(variant) for variant in variants}) < len(variants):
        raise FusionError("the same module is given for several variants; each needs a module of its own")
    first = structure_of(variants[0])
    owners: dict[int, int] = {}
    for number, variant in enumerate(variants):
        structure = structure_of(variant)
        for name in (*first, *structure):
            if first.get(name) != structure.get(name):
                raise FusionError(
                    f"variant {number} has {_said(structure.get(name))} at {name or 'its root'} where variant 0 has "
                    f"{_said(first.get(name))}; variants of one array have one architecture: train others in an array "
                    "of their own"
                )
        for tensor in variant.parameters():
            if owners.setdefault(id(tensor), number) != number:
                raise FusionError(f"variants {owners[id(tensor)]} and {number} share a parameter; copy.deepcopy one")


def differing_attributes(variants: Sequence[nn.Module], own: Iterable[str] = ()) -> dict[str, tuple[str, ...]]:
    """For each module's name its own attributes that are not the same in all variants, but for those in `own`."""
    found: dict[str, tuple[str, ...]] = {}
    ignored = {*vars(nn.Module()), *own}
    is_alike = partial(alike, parts=frozenset(id(part) for variant in variants for part in variant.modules()))
    for (name, first), *others in zip(*(variant.named_modules() for variant in variants), strict=True):
        names = [
            attribute
            for attribute, value in vars(first).items()
            if attribute not in ignored
            and any(
                not is_alike(_without_numbers(value), _without_numbers(vars(other).get(attribute)))
                for _, other in others
            )
        ]
        if names:
            found[name] = tuple(names)
    return found


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor or holds one: a state that each variant has its own of, not a setting."""
    if isinstance(value, tuple | list):
        return any(has_tensor(item) for item in value)
    if isinstance(value, dict):
        return any(has_tensor(item) for item in value.values())
    return isinstance(value, Tensor)


def _without_numbers(value: Any) -> Any:
    """Tensors by their shapes alone: what is in them is each variant's own."""
    if not has_tensor(value):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _without_numbers(item) for key, item in value.items()}
    return [_without_numbers(item) for item in value]


def structure_of(module: nn.Module) -> Mapping[str, Any]:
    """Class, shapes and sharing of everything under a name."""
    structure: dict[str, Any] = {}
    first_names: dict[int, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        structure[name] = type(part).__qualname__
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise FusionError(f"{name} of a lazy module has no shape yet; run one batch through each variant first")
        tied = first_names.setdefault(id(tensor), name)
        structure[name] = (
            list(tensor.shape),
            str(tensor.dtype),
            str(tensor.device),
            "" if tied == name else f"= {tied}",
        )
    return structure


def _said(fact: Any) -> str:
    if fact is None:
        return "nothing"
    return fact if isinstance(fact, str) else " ".join(str(part) for part in fact if part)


def alike(left: Any, right: Any, depth: int = 4, parts: Container[int] = ()) -> bool:
    """Whether two settings are the same; what cannot be compared, or lies too deep, is taken to be.

    Args:
        parts: ids of the models' registered modules, which are compared elsewhere. Others with parameters are each
            variant's own, and differ sooner or later.
    """
    if left is right or depth == 0:
        return True
    if isinstance(left, nn.Module) or isinstance(right, nn.Module):
        return all(id(one) in parts or not _has_numbers(one) for one in (left, right))
    is_alike = partial(alike, parts=parts)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_dense(left), _dense(right))
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(is_alike(*pair, depth) for pair in zip(left, right, strict=True))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(is_alike(left[key], right[key], depth) for key in left)
    if isinstance(left, (*_SIMPLE, Enum)) or isinstance(right, (*_SIMPLE, Enum)):
        return bool(left == right) or (left != left and right != right)
    if type(left) is not type(right):
        return False
    if isinstance(left, partial):
        return is_alike((left.func, left.args, left.keywords), (right.func, right.args, right.keywords), depth - 1)
    if isinstance(left, FunctionType):
        return left.__code__ is right.__code__ and is_alike(_captured(left), _captured(right), depth - 1)
    if isinstance(left, MethodType):
        return left.__func__ is right.__func__ and is_alike(left.__self__, right.__self__, depth - 1)
    if isinstance(left, np.generic | np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
    if isinstance(left, deque):
        return is_alike(list(left), list(right), depth)
    if isinstance(left, BuiltinFunctionType | set | frozenset):
        return bool(left == right)
    return is_alike(_fields(left), _fields(right), depth - 1)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _has_numbers(one: Any) -> bool:
    """Those without parameters (a metric) are objects to collect in."""
    return not isinstance(one, nn.Module) or next(one.parameters(), None) is not None


def _captured(function: FunctionType) -> Any:
    """What a function knows besides its arguments: a smoothing that it was made with."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return cells, function.__defaults__, function.__kwdefaults__


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _fields(value: Any) -> dict[str, Any]:
    """Of a configuration object, say; others have none that could be compared."""
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]
