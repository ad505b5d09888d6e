"""Activation checkpointing inside a fused forward: the region is computed again under the array mode.

`torch.utils.checkpoint` calls the region once more during backward, when the mode is long off and the first variant's
module has its own parameters back; and it hands over copies of the inputs, which bear no marks.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.utils.checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten

from pl_pipe.tensors.arrays import ArrayMode, OwnStreams, Streams, is_array, mark
from pl_pipe.tensors.interception import functions_applied_through, scripted_called_through

_REENTRANT = "CheckpointFunction"
_MODULE = "torch.utils.checkpoint"
_SETTINGS = 4  # of the generator, before the region's own arguments


class Checkpoints:
    """Listens to checkpoints and custom autograd functions, which no function mode sees, while an array runs."""

    def __init__(
        self,
        fused_again: Callable[[], AbstractContextManager[None]],
        mode: ArrayMode,
        streams: Streams,
        *,
        is_apart: Callable[[], bool],
    ) -> None:
        self._fused_again = fused_again
        self._mode = mode
        self._streams = streams
        self._is_apart = is_apart
        """Whether one variant's module runs by itself just now."""

    @contextmanager
    def routed(self) -> Iterator[None]:
        module: Any = torch_checkpoint
        plain = module._checkpoint_without_reentrant_generator
        thread = threading.get_ident()

        def is_elsewhere() -> bool:
            return threading.get_ident() != thread or self._is_apart()

        @functools.wraps(plain)
        def generator(region: Callable[..., Any], preserve: Any, *rest: Any, **kwargs: Any) -> Any:
            if is_elsewhere():
                return plain(region, preserve, *rest, **kwargs)
            arrays = [is_array(value) for value in tree_flatten((rest[_SETTINGS:], kwargs))[0]]
            return plain(self._again(region, arrays, bool(preserve)), preserve, *rest, **kwargs)

        def applied(function: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_elsewhere():
                return apply(*args, **kwargs)
            if function.__module__ != _MODULE:
                return self._mode.custom_function(function, apply, args, kwargs)
            if function.__name__ != _REENTRANT:
                return apply(*args, **kwargs)
            region, preserve, *inputs = args
            return torch_checkpoint.checkpoint(region, *inputs, use_reentrant=False, preserve_rng_state=preserve)

        def scripted(function: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_elsewhere():
                return call(*args, **kwargs)
            return self._mode.custom_function(function, call, args, kwargs, what="a scripted function")

        module._checkpoint_without_reentrant_generator = generator
        try:
            with functions_applied_through(applied), scripted_called_through(scripted):
                yield
        finally:
            module._checkpoint_without_reentrant_generator = plain

    def _again(self, region: Callable[..., Any], arrays: list[bool], preserve: bool) -> Callable[..., Any]:
        """The region for backward: under the mode, with the marks and the random numbers of its first run."""
        streams = self._streams
        drawn = streams.states if isinstance(streams, OwnStreams) and preserve else None

        def again(*args: Any, **kwargs: Any) -> Any:
            flat, structure = tree_flatten((args, kwargs))
            for value, was_array in zip(flat, arrays, strict=True):
                if was_array:
                    mark(value)
            args, kwargs = tree_unflatten(flat, structure)
            if drawn is None or not isinstance(streams, OwnStreams):
                with self._fused_again():
                    return region(*args, **kwargs)
            now, streams.states = streams.states, drawn
            try:
                with self._fused_again():
                    return region(*args, **kwargs)
            finally:
                streams.states = now

        return again
