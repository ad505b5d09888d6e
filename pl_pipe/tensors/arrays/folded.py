"""Operations on samples or channels that do not mix them: the variants' dimension is folded into another.

Pooling acts on every channel alone, so [N, M·C, H, W] serves where that is how the array lies; operations that mix
channels (a pixel shuffle) see M·N samples.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from pl_pipe.tensors.arrays.layout import from_channels, from_samples, lies_by_channels, to_channels, to_samples
from pl_pipe.tensors.arrays.marks import is_array, mark

_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool")
# The rank of a batch; without one, a sample would be taken for the variants.
_BY_CHANNEL = {
    f"{pool}{spatial}d{ending}": spatial + 2
    for pool in _POOLS
    for spatial in (1, 2, 3)
    for ending in ("", "_with_indices")
}
_BY_SAMPLE = {"pixel_shuffle": 4, "pixel_unshuffle": 4, "channel_shuffle": 4}
FOLDED = frozenset(_BY_CHANNEL) | frozenset(_BY_SAMPLE) | {"interpolate", "pad"}


def folded(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], width: int) -> Any:
    if name == "pad":
        return _pad(width, *args, **kwargs)
    array, *rest = args or (kwargs.get("input"),)
    kwargs = {key: value for key, value in kwargs.items() if key != "input"}
    if not is_array(array) or any(is_array(value) for value in (*rest, *kwargs.values())):
        return NotImplemented
    if name == "interpolate":
        expected = array.ndim - 1 if array.ndim > 3 else -1
    else:
        expected = _BY_CHANNEL.get(name) or _BY_SAMPLE.get(name, -1)
    if array.ndim - 1 != expected:
        return NotImplemented
    if name not in _BY_SAMPLE and lies_by_channels(array):
        return _each(function(to_channels(array), *rest, **kwargs), lambda out: from_channels(out, width))
    return _each(function(to_samples(array), *rest, **kwargs), lambda out: from_samples(out, width))


def _pad(width: int, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:  # noqa: A002
    """Padding counts dimensions from the last; only the other modes ask for a number of them."""
    if not is_array(input) or len(pad) > 2 * (input.ndim - 1):
        return NotImplemented
    if mode == "constant":
        return mark(F.pad(input, pad, mode, value))
    if len(pad) != 2 * (input.ndim - 3):
        return NotImplemented
    if lies_by_channels(input):
        return from_channels(F.pad(to_channels(input), pad, mode, value), width)
    return from_samples(F.pad(to_samples(input), pad, mode, value), width)


def _each(out: Any, unfold: Callable[[Any], Any]) -> Any:
    return tuple(unfold(item) for item in out) if isinstance(out, tuple) else unfold(out)
