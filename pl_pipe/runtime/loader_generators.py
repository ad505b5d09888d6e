"""The random generators that a data loader holds itself: shared_loading -> *this* -> equal states on all ranks."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from pl_pipe.errors import ConfigError
from pl_pipe.runtime.random_stream import RandomStream

Broadcast = Callable[[Any], Any]
"""Gives every rank of a pipeline the object that its first rank passed, as Lightning's `Strategy.broadcast` does."""
_Private = torch.Generator | np.random.BitGenerator | np.random.RandomState | random.Random
_LOOKED_AT = 1000  # objects; a data set may hold millions, and generators lie near the top
_LONG = 64  # items; a longer list holds samples


def agree_on_generators(loader: Any, stream: RandomStream, broadcast: Broadcast | None) -> None:
    """Gives the generators that a loader holds equal states on all ranks: the first rank's, or seeds of the stream."""
    found = list(_private_generators(loader))
    if broadcast is None:
        with stream:
            for generator in found:
                _seed(generator, random.getrandbits(32))
        return
    kinds = [type(generator).__name__ for generator in found]
    first_kinds, states = broadcast((kinds, [_state(generator) for generator in found]))
    if kinds != first_kinds:
        raise ConfigError(
            f"this rank's data loader holds the random generators {kinds}, the first rank's {first_kinds}, but the "
            "ranks of a pipeline need the same batches; make the loader and its data set alike on every rank"
        )
    for generator, state in zip(found, states, strict=True):
        _set_state(generator, state)


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """The generators that a loader holds stand afterwards as they did before."""
    before = [(generator, _state(generator)) for generator in _private_generators(loader)]
    try:
        yield
    finally:
        for generator, state in before:
            _set_state(generator, state)


def _private_generators(loader: Any) -> Iterator[_Private]:
    """Generators among the attributes of a loader, its samplers, data set, transforms: nearest first, each once."""
    of_the_process = (torch.default_generator, mtrand._rand, random.random.__self__)  # type: ignore[attr-defined]
    seen = {id(generator) for generator in of_the_process}
    queue = deque([loader])
    while queue and len(seen) < _LOOKED_AT:
        item = queue.popleft()
        if isinstance(item, np.random.Generator):
            item = item.bit_generator
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, MethodType)):
            continue
        if isinstance(item, _Private) and not isinstance(item, random.SystemRandom):  # that one has no state
            yield item
        elif isinstance(item, (list, tuple, dict)):
            if len(item) <= _LONG:
                queue.extend(item.values() if isinstance(item, dict) else item)
        elif hasattr(item, "__dict__"):
            queue.extend(vars(item).values())
        else:
            continue
        seen.add(id(item))


def _state(generator: _Private) -> Any:
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: _Private, state: Any) -> None:
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: _Private, seed: int) -> None:
    if isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(seed).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)
