"""Generators that the run's data is shuffled with, beside the process's. arguments of a trainer -> *generators*.

A loader with a generator of its own goes on drawing from it in the next array; a run of that array alone would begin.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch.utils._pytree import tree_leaves

_HOLDERS = ("sampler", "batch_sampler")


class LoaderGenerators:
    """As they stood when this was made; given loaders, and what a data module keeps."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        found = {id(one): one for argument in tree_leaves(list(arguments)) for one in _generators(argument)}
        self._states = [(generator, generator.get_state()) for generator in found.values()]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.set_state(state)


def _generators(given: Any) -> Iterator[torch.Generator]:
    if isinstance(given, torch.Generator):
        yield given
    elif isinstance(given, L.LightningDataModule):
        for value in vars(given).values():
            if isinstance(value, torch.Generator | torch.utils.data.DataLoader):
                yield from _generators(value)
    elif hasattr(given, "generator"):
        yield from _generators(given.generator)
    for name in _HOLDERS:
        holder = getattr(given, name, None)
        if holder is not None and holder is not given:
            yield from _generators(holder)
