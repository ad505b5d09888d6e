"""What makes modules variants of one another: the same structure; and where their settings differ.

A module whose own attributes (a dropout probability, a slope, a flag) or forward hooks differ cannot run once for all:
it runs once a variant, unless a rule knows what to do with the difference. The root is the exception: there the
attributes that differ (a learning rate) are mostly not the forward's. Reading what differs from elsewhere is refused.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pl_pipe.errors import FusionError

_SIMPLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
HOOKS = frozenset(("_forward_pre_hooks", "_forward_hooks"))
_ABSENT = object()
IGNORED = frozenset(vars(nn.Module())) - HOOKS | {"_compiled_call_impl"}
"""Attributes of modules that are no settings."""


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


def alike_in_all(attribute: str, stored: Sequence[Mapping[str, Any]], is_alike: Callable[[Any, Any], bool]) -> bool:
    """Whether it is the same in all variants; some may not have it."""
    first, *others = (of_one.get(attribute, _ABSENT) for of_one in stored)
    if all(other is first for other in others):
        return True
    if attribute in HOOKS:  # by numbers that are nobody else's
        return all(is_alike(list(first.values()), list(other.values())) for other in others)
    plain = _without_numbers(first)
    return all(is_alike(plain, _without_numbers(other)) for other in others)


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
        structure[name] = class_name(type(part))
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


_classes: dict[str, list[ref[type]]] = {}
"""By name, those that differ."""


def class_name(kind: type) -> str:
    """The same for classes that are made of the same, as by a function that makes one at every call; its methods may
    know other numbers each time, and then there are several of one name."""
    known = _classes.setdefault(kind.__qualname__, [])
    same = (number for number, one in enumerate(known) if (other := one()) is not None and _same_class(kind, other))
    number = next(same, len(known))
    if number == len(known):
        known.append(ref(kind))
    return kind.__qualname__ if number == 0 else f"{kind.__qualname__} (the {number + 1}. of this name)"


def _same_class(left: type, right: type) -> bool:
    if left is right:
        return True
    bases = left.__bases__, right.__bases__
    if left.__qualname__ != right.__qualname__ or len(bases[0]) != len(bases[1]) or not all(map(_same_class, *bases)):
        return False
    return alike(_made_of(left), _made_of(right))


def _made_of(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(kind).items()
        if name != "_abc_impl" and (not name.startswith("__") or isinstance(value, FunctionType))
    }


def _said(fact: Any) -> str:
    if fact is None:
        return "nothing"
    return fact if isinstance(fact, str) else " ".join(str(part) for part in fact if part)


def alike(left: Any, right: Any, depth: int = 4, parts: Container[int] = (), *, numbers: bool = True) -> bool:
    """Whether two settings are the same; what cannot be compared, or lies too deep, is taken to be.

    Args:
        parts: ids of the models' registered modules, which are compared elsewhere. Others with parameters are each
            variant's own, and differ sooner or later.
        numbers: tensors are compared by these, too.
    """
    if left is right or depth == 0:
        return True
    if isinstance(left, nn.Module) or isinstance(right, nn.Module):
        return all(id(one) in parts or not _has_numbers(one) for one in (left, right))
    is_alike = partial(alike, parts=parts, numbers=numbers)
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        same = left.shape == right.shape and left.dtype == right.dtype
        return same and (not numbers or torch.equal(_dense(left), _dense(right)))
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
    return is_alike(fields_of(left), fields_of(right), depth - 1)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _has_numbers(one: Any) -> bool:
    """Those without parameters (a metric) are objects to collect in."""
    return not isinstance(one, nn.Module) or next(one.parameters(), None) is not None


def _captured(function: FunctionType) -> Any:
    """What a function knows besides its arguments: a smoothing that it was made with."""
    named = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = [cell.cell_contents for name, cell in named if name != "__class__" and _is_filled(cell)]
    return cells, function.__defaults__, function.__kwdefaults__


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def fields_of(value: Any) -> dict[str, Any]:
    """Of a configuration object, say; others have none that could be compared."""
    slots = [name for kind in type(value).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _names(slots: str | Iterable[str]) -> list[str]:
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if not name.startswith("__")]
