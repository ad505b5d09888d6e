"""What modules keep in Python: attributes, and the containers and objects in these. modules -> *PlainState* -> before.

A step may collect results in lists, count in objects, keep the last batch. All that is found by a walk that takes no
copies of tensors it does not have to, so that it may be done at every step.
"""

import copy
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pl_pipe.tensors.lineage import version

_ATOMS = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_OTHERS = (sys.stdlib_module_names - {"types", "argparse"}) | {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"),
    *("omegaconf", "hydra", "transformers", "tokenizers"),
    *("wandb", "mlflow", "tensorboard", "tensorboardX", "comet_ml", "neptune"),
}
"""Packages whose objects are machinery, settings and loggers, which no step counts in."""
_DEPTH = 3
"""Objects within objects; deeper ones are someone's machinery."""
_UPDATES = (dict.update, OrderedDict.update, Counter.update)
_ABSENT = object()


def is_object(value: Any) -> bool:
    """One with attributes that a step may change. A module that has parameters is no place to collect in."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is None
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | Enum | Tensor | torch.utils.data.Dataset)
        and kind.__module__.partition(".")[0] not in _OTHERS
    )


def contents(holder: Any) -> Any:
    """A copy of what is in a container or an object, one deep; None for everything else."""
    if isinstance(holder, list | deque | tuple):
        return list(holder)
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, set):
        return set(holder)
    if isinstance(holder, np.ndarray):
        return holder.copy()
    return dict(vars(holder)) if is_object(holder) else None


def fill(holder: Any, items: Any) -> None:
    """Gives a container or an object these contents."""
    if isinstance(holder, list):
        holder[:] = items
    elif isinstance(holder, dict) and type(holder).update not in _UPDATES:
        for key in holder.keys() - items.keys():
            del holder[key]
        for key, value in items.items():  # transformers' outputs refuse all other ways
            holder[key] = value
    elif isinstance(holder, deque | set | dict):
        holder.clear()
        holder.extend(items) if isinstance(holder, deque) else holder.update(items)
    elif isinstance(holder, np.ndarray):
        holder[...] = items
    else:
        vars(holder).clear()
        vars(holder).update(items)


def values_in(items: Any) -> Iterable[Any]:
    """Of contents: what may hold more."""
    if isinstance(items, dict):
        return items.values()
    return items if isinstance(items, list) else ()


def is_atom(value: Any) -> bool:
    return type(value) in _ATOMS


class PlainState:
    """State of modules in Python as it was when this was made."""

    def __init__(
        self,
        modules: Iterable[nn.Module],
        ignored: Iterable[str] = (),
        registered: Collection[int] = (),
        only: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """`ignored` are names of attributes; `registered` are ids of modules that are not to be looked into; `only` has
        names of attributes for a module's id, where not all matter."""
        self.modules = list(modules)
        self._ignored = frozenset(ignored)
        self._only = only
        self._registered = registered or {id(module) for module in self.modules}
        self.attributes = [self.attributes_of(module) for module in self.modules]
        self._known: dict[int, bool] = {}
        self.holders: dict[int, tuple[Any, Any]] = {}
        """Containers and objects, with what was in them."""
        self.tensors: dict[int, tuple[Tensor, int, Tensor | None]] = {}
        """With their versions; those that a step may count in have a copy, those in lists have none."""
        for attributes in self.attributes:
            self._look(attributes, _DEPTH)

    def attributes_of(self, module: nn.Module) -> dict[str, Any]:
        if self._only is not None:
            stored = vars(module)
            return {name: stored[name] for name in self._only[id(module)] if name in stored}
        return {name: value for name, value in vars(module).items() if name not in self._ignored}

    def restore(self) -> None:
        for module, before in zip(self.modules, self.attributes, strict=True):
            stored = vars(module)
            for name in self.attributes_of(module).keys() - before.keys():
                del stored[name]
            stored.update(before)
        for holder, items in self.holders.values():
            if not isinstance(holder, tuple) and not same_items(contents(holder), items, is_):
                fill(holder, items)
        for tensor, _, values in self.tensors.values():
            if values is not None and self.is_written(tensor):
                tensor.data.copy_(values)

    def changed(self, is_same: Callable[[Any, Any], bool] = is_) -> Iterator[tuple[int, str]]:
        """The module, by its place, and the name of each attribute that is not what it was; or is gone.

        `is_same` compares a value that is there with the one that was."""
        self._known.clear()
        for place, (module, before) in enumerate(zip(self.modules, self.attributes, strict=True)):
            now = self.attributes_of(module)
            for name, value in now.items():
                was = before.get(name, _ABSENT)
                if is_atom(value) and is_atom(was):
                    if value is not was and (value != was or type(value) is not type(was)):
                        yield place, name
                elif not is_same(value, was) or self.is_changed(value, is_same):
                    yield place, name
            for name in before.keys() - now.keys():
                yield place, name

    def is_written(self, tensor: Tensor) -> bool:
        """Whether a tensor that was there has been changed in place; those made for inference do not count writes."""
        if id(tensor) not in self.tensors:
            return False
        _, seen, values = self.tensors[id(tensor)]
        if tensor.is_inference():
            return values is not None and not torch.equal(tensor, values)
        return version(tensor) != seen

    def _look(self, items: Any, depth: int, *, counts: bool = True) -> None:
        for value in values_in(items):
            if type(value) in _ATOMS or id(value) in self._registered:
                continue
            if isinstance(value, Tensor):
                self.tensors[id(value)] = value, version(value), value.detach().clone() if counts else None
                continue
            if id(value) in self.holders:
                continue
            inner = contents(value)
            if inner is None:
                continue
            self.holders[id(value)] = value, inner
            below = depth if isinstance(value, list | deque | tuple | dict) else depth - 1
            if below > 0:
                self._look(inner, below, counts=isinstance(inner, dict))

    def is_changed(self, value: Any, is_same: Callable[[Any, Any], bool] = is_) -> bool:
        """Whether anything in it is not what it was; after `changed` has begun."""
        known = self._known
        if type(value) in _ATOMS or id(value) in self._registered:
            return False
        if isinstance(value, Tensor):
            return self.is_written(value)
        if id(value) in known:
            return known[id(value)]
        known[id(value)] = False  # while it is looked at: it may hold itself
        if id(value) not in self.holders:
            return False  # too deep
        before = self.holders[id(value)][1]
        now = contents(value)
        known[id(value)] = not same_items(now, before, is_same) or any(
            self.is_changed(item, is_same) for item in values_in(now)
        )
        return known[id(value)]


def same_items(now: Any, before: Any, is_same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(now, np.ndarray):
        return bool(now.shape == before.shape and now.tobytes() == before.tobytes())
    if isinstance(now, set):
        return bool(now == before)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(name in before and is_same(value, before[name]) for name, value in now.items())
    return all(map(is_same, now, before))


def copied(holder: Any, items: Any) -> Any:
    """A new container or object of the same kind with these contents."""
    if isinstance(holder, tuple):
        return type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items)
    twin = copy.copy(holder)
    fill(twin, items)
    return twin
