"""What a step changes in a model besides weights, so that the step can be run again without being counted twice.

Batch norm's statistics, a metric's sums, a counter, a hidden state that is carried from batch to batch: the repetition
must find them as the first run did, and leave no trace. Attributes that are assigned are simply put back. A tensor that
is changed in place has to be copied before the step; which ones those are is learnt from a first step, for which all
are. (Versions alone do not tell: batch norm does not count its changes.)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pl_pipe.profiling.preserve import contents_of, refill
from pl_pipe.tensors.ghosts import twin
from pl_pipe.tensors.lineage import version

NOT_A_STEPS = frozenset(vars(nn.Module()))
"""Attributes of every module: weights, parts and hooks."""
_ABSENT = object()

Store: TypeAlias = dict[str, Any]
Place: TypeAlias = tuple[int, str]
"""The id of a module's dictionary, and a name in it."""


class ModelMemory:
    """The buffers and attributes of modules before a step, as far as the step changes them."""

    def __init__(self, modules: Iterable[nn.Module], changing: set[Place], *, learn: bool) -> None:
        """`changing` are the tensors that steps are known to change in place; `note_changes` adds to them.

        To `learn`, all tensors are copied, and compared afterwards.
        """
        self._changing = changing
        self._modules = tuple(modules)
        self._changed: list[tuple[Store, str, Any]] = []
        """With the value that stood there."""
        self._before: list[tuple[Store, Store]] = []
        self._tensors: dict[Place, tuple[Tensor, int, Tensor | None]] = {}
        """Tensors, their versions, and copies of those that change."""
        for store in self._stores():
            before = {name: value for name, value in store.items() if name not in NOT_A_STEPS}
            self._before.append((store, before))
            for name, value in before.items():
                if isinstance(value, Tensor) and not value.is_meta and value.layout is torch.strided:
                    place = id(store), name
                    self._tensors[place] = value, version(value), twin(value) if learn or place in changing else None

    def note_changes(self) -> bool:
        """To be called after the step. False where a tensor was changed of which there is no copy."""
        copies: dict[Place, Tensor] = {}
        complete = True
        for place, (tensor, old, copied) in self._tensors.items():
            if copied is None and version(tensor) != old:
                self._changing.add(place)
                complete = False
            elif copied is not None and (place in self._changing or not torch.equal(copied, tensor)):
                self._changing.add(place)
                copies[place] = copied
        for store, before in self._before:
            for name in (*before, *(name for name in store if name not in before and name not in NOT_A_STEPS)):
                old_value = copies.get((id(store), name), before.get(name, _ABSENT))
                if store.get(name, _ABSENT) is not old_value:
                    self._changed.append((store, name, old_value))
        self._before.clear()
        self._tensors.clear()
        return complete

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Within the block the model is as it was before the step; afterwards, as it was before the block."""
        contents = [contents_of(module, stores=False) for module in self._modules]
        now = [(store, name, store.get(name, _ABSENT)) for store, name, _ in self._changed]
        for store, name, value in self._changed:
            _put(store, name, value)
        try:
            yield
        finally:
            for store, name, value in now:
                _put(store, name, value)
            for held in contents:
                refill(held)

    def _stores(self) -> Iterator[Store]:
        for module in self._modules:
            yield vars(module)
            yield module._buffers


def _put(store: Store, name: str, value: Any) -> None:
    if value is _ABSENT:
        store.pop(name, None)
    else:
        store[name] = value
