"""The step that a thread is in, and what must listen to it outside the function mode.

Custom autograd functions and `torch.utils.checkpoint` are seen by no mode. While any step runs they are routed through
the step of the calling thread; with the last step torch is as it was. Ranks may be threads of one process.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from pl_pipe.tensors.interception import functions_applied_through, taken_off

if TYPE_CHECKING:
    from pl_pipe.tensors.ghosts.step import GhostStep

_REENTRANT = "CheckpointFunction"
_lock = threading.Lock()
_patches = ExitStack()
_steps = 0


class _Thread(threading.local):
    step: "GhostStep | None" = None


THREAD = _Thread()


def in_step() -> bool:
    """Whether the calling thread runs one."""
    return THREAD.step is not None


@contextmanager
def outside_steps() -> Iterator[None]:
    """Within the block the calling thread is in none, whatever has called."""
    step = THREAD.step
    if step is None:
        yield
        return
    THREAD.step = None
    try:
        with taken_off(step):
            yield
    finally:
        THREAD.step = step


@contextmanager
def listening() -> Iterator[None]:
    """Routes custom functions and checkpoints through the threads' steps."""
    global _steps
    with _lock:
        _steps += 1
        if _steps == 1:
            _patches.enter_context(functions_applied_through(_applied))
            _patches.enter_context(_checkpoints_routed())
            _patches.enter_context(_parameters_copied())
    try:
        yield
    finally:
        with _lock:
            _steps -= 1
            if _steps == 0:
                _patches.close()


def _applied(function: type, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A custom autograd function is applied: an operation like any other, except where it is a checkpoint."""
    step = THREAD.step
    if step is None or step.is_own(function):
        return plain(*args, **kwargs)
    if function.__name__ == _REENTRANT:
        region, preserve, *inputs = args
        if is_whole(region):
            return torch_checkpoint.checkpoint(region, *inputs, use_reentrant=False, preserve_rng_state=preserve)
        return region(*inputs)
    return step.custom_function(function, plain, args, kwargs)


@contextmanager
def _checkpoints_routed() -> Iterator[None]:
    """A region that may cross stages runs without recomputation: its layers are equal, only memory is not saved."""
    module: Any = torch_checkpoint
    plain = module._checkpoint_without_reentrant_generator

    @functools.wraps(plain)
    def generator(region: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        if THREAD.step is not None and not is_whole(region):
            yield
        else:
            yield from plain(region, *args, **kwargs)

    module._checkpoint_without_reentrant_generator = generator
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = plain


@contextmanager
def _parameters_copied() -> Iterator[None]:
    """A copy of a parameter, which torch makes unseen by modes, is where the parameter is."""
    kind: Any = nn.Parameter
    plain = kind.__deepcopy__

    @functools.wraps(plain)
    def deepcopy(parameter: nn.Parameter, memo: dict[int, Any]) -> Any:
        is_new, step = id(parameter) not in memo, THREAD.step
        copied = plain(parameter, memo)
        value = step.value(parameter) if step is not None and is_new else None
        return copied if step is None or value is None else step.show(copied, value.home)

    kind.__deepcopy__ = deepcopy
    try:
        yield
    finally:
        kind.__deepcopy__ = plain


def is_whole(region: Callable[..., Any]) -> bool:
    """Whether a callable is a module (or a method of one) that one stage owns whole."""
    while isinstance(region, functools.partial):
        region = region.func
    module = region if isinstance(region, nn.Module) else getattr(region, "__self__", None)
    routed = vars(module).get("forward") if isinstance(module, nn.Module) else None
    return bool(getattr(getattr(routed, "place", None), "whole", False))
