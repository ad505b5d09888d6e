"""Divides a batch into micro-batches, and puts together what their steps returned."""

import copy
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pl_pipe.errors import ConfigError
from pl_pipe.log import get_logger
from pl_pipe.tensors.trees import tensors_in

_log = get_logger(__name__)


class MicroBatch(NamedTuple):
    content: Any
    share: float
    """Of the batch's samples: what a mean over the micro-batch counts in the mean over the batch."""


def batch_size(batch: Any) -> int | None:
    """The first dimension of the first tensor that has one."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0), None)


def least_samples(module: nn.Module) -> int:
    """What a micro-batch needs to be trained on: two samples where there is batch norm, which has no spread of one."""
    return 2 if any(isinstance(part, _BatchNorm) for part in module.modules()) else 1


def divided_or_whole(batch: Any, count: int, *, least: int = 1, wanted: bool) -> list[MicroBatch]:
    """As `split`; but a batch that cannot be divided stays whole, unless so many parts are `wanted`."""
    try:
        return split(batch, count, least=least)
    except ConfigError as error:
        if wanted:
            raise
        _warn_once(f"a batch goes through the stages whole, since it cannot be divided ({error})")
        return [MicroBatch(batch, 1.0)]


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


def split(batch: Any, count: int, *, least: int = 1) -> list[MicroBatch]:
    """`count` parts of nearly equal size; fewer where there are not `least` samples for each.

    Tensors are divided along their first dimension, which must be the same. So are arrays that have as much of it, and
    lists and tuples with one entry a sample (texts); numbers, tuples of them (a size) and everything else go with every
    part.
    """
    size = batch_size(batch)
    if count == 1 or size is None or size == 1:
        if count > 1 and size is None:
            raise ConfigError(
                f"num_microbatches={count}, but the batch ({type(batch).__name__}) holds no tensor with a dimension to "
                f"divide; set num_microbatches=1"
            )
        return [MicroBatch(batch, 1.0)]
    sizes = sorted({int(tensor.shape[0]) for tensor in tensors_in(batch) if tensor.dim() > 0})
    if len(sizes) > 1:
        raise ConfigError(
            f"num_microbatches={count}, but the batch's tensors have first dimensions {sizes}, so it is not clear "
            f"which one counts the samples; give all tensors that, or none (a number), or set num_microbatches=1"
        )
    bounds = torch.tensor_split(torch.arange(size), max(1, min(count, size // least)))
    ranges = [(int(part[0]), int(part[-1]) + 1) for part in bounds]
    return [MicroBatch(_part(batch, start, end, size), (end - start) / size) for start, end in ranges]


def _part(tree: Any, start: int, end: int, size: int) -> Any:
    if isinstance(tree, Tensor):
        return tree[start:end] if tree.dim() > 0 else tree
    if isinstance(tree, np.ndarray):
        return tree[start:end] if tree.shape[:1] == (size,) else tree
    if isinstance(tree, Mapping):
        parts = {key: _part(value, start, end, size) for key, value in tree.items()}
        if not isinstance(tree, dict | UserDict):
            return type(tree)(parts)  # type: ignore[call-arg]
        changed = copy.copy(tree)  # not made anew: a defaultdict takes its factory first
        changed.update(parts)
        return changed
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_part(item, start, end, size) for item in tree))
    if isinstance(tree, tuple | list):
        if len(tree) == size and not tensors_in(tree) and not _is_size(tree):
            return tree[start:end]
        items = [_part(item, start, end, size) for item in tree]
        return tuple(items) if isinstance(tree, tuple) else items
    if tensors_in(tree):
        raise ConfigError(
            f"num_microbatches is more than 1, but the batch holds a {type(tree).__name__}, which cannot be divided; "
            f"let the collate function return tensors in dictionaries, tuples or lists, or set num_microbatches=1"
        )
    return tree


def _is_size(tree: Any) -> bool:
    """Numbers in a tuple are more often a shape than one a sample, even where there are as many."""
    return isinstance(tree, tuple) and all(isinstance(item, int | float) for item in tree)


def combined(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """What one step on the whole batch would have returned: means are averaged, samples joined.

    A number is taken for a mean over samples. What is neither, and not the same for all, stays a list with one entry a
    micro-batch.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: combined([value[key] for value in values], shares) for key in first}
    if isinstance(first, Tensor) and first.dim() == 0 and first.is_floating_point():
        return mean_of(values, shares)
    if isinstance(first, Tensor) and first.dim() > 0:
        return torch.cat(list(values))
    if isinstance(first, float):
        return sum(value * share for value, share in zip(values, shares, strict=True))
    if isinstance(first, int | str | bytes | None) and all(value == first for value in values):
        return first
    return list(values)


def mean_of(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value * share
    return total


REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
"""By the names that logging uses, besides `mean`."""
