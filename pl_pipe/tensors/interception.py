"""Where a step is listened to: leaf modules' forwards, custom autograd functions, and the function-mode stack.

Each is a context manager that puts back exactly what it found, whatever happened inside.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode

# Modules taken whole although they have children: attention hands its projection's weight, not the module, to a
# fused function; operations inside a scripted module are seen by nobody, nor those of a compiled one (see below).
_WHOLE = (nn.MultiheadAttention, torch.jit.ScriptModule)
_COMPILED = "_orig_mod"  # the child of what torch.compile returns; its class is not worth importing the compiler for
_ABSENT = object()
UNCOMPILED = "_pl_pipe_uncompiled"
"""Set on a compiled module while it runs what it was made from: then that is looked into."""

LeafCall = Callable[[nn.Module, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a leaf's forward, with the module, its qualified name, the forward and its arguments."""
FunctionCall = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a custom autograd function, with its class, the function and its arguments."""
ScriptedCall = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a scripted function, with that, what calls it, and its arguments."""


def leaf_modules(root: nn.Module) -> dict[nn.Module, str]:
    """Modules that count as one layer, with their qualified names; never the root itself."""
    leaves: dict[nn.Module, str] = {}
    seen = {root}

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if child in seen:
                continue
            seen.add(child)
            opaque = hasattr(child, _COMPILED) and not vars(child).get(UNCOMPILED)
            if isinstance(child, _WHOLE) or next(child.children(), None) is None or opaque:
                leaves[child] = prefix + name
            else:
                walk(child, f"{prefix}{name}.")

    walk(root, "")
    return leaves


@contextmanager
def leaves_called_through(root: nn.Module, call: LeafCall) -> Iterator[None]:
    """Every leaf module's forward goes through `call`. The modules' own hooks run outside of it, as ever."""
    with Routes(leaf_modules(root), call):
        yield


class Routes:
    """The forwards of some modules go through `call` within the block; made once, it may be entered again and again."""

    def __init__(self, modules: Mapping[nn.Module, str], call: LeafCall) -> None:
        self._places = []
        for module, name in modules.items():
            before = vars(module).get("forward", _ABSENT)  # first: scripted modules store it when asked
            self._places.append((vars(module), before, _routed(call, module, name, module.forward)))
            _put_back(vars(module), before)

    def __enter__(self) -> None:
        for attributes, _, forward in self._places:
            attributes["forward"] = forward  # not through their own __setattr__

    def __exit__(self, *_: object) -> None:
        for attributes, before, _forward in self._places:
            _put_back(attributes, before)


@contextmanager
def functions_applied_through(call: FunctionCall) -> Iterator[None]:
    """Custom autograd functions, which no function mode sees, go through `call`.

    `Function.apply` itself is left alone, because `my_function = MyFunction.apply` at the top of a file would keep the
    original; it calls its parent's `apply`, and that one is looked up anew at every call.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return call(cls, super(_SingleLevelFunction, cls).apply, args, kwargs)  # type: ignore[misc]

    parent: Any = _SingleLevelFunction
    before = vars(parent).get("apply", _ABSENT)
    parent.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is _ABSENT:
            del parent.apply
        else:
            parent.apply = before


@contextmanager
def scripted_called_through(call: ScriptedCall) -> Iterator[None]:
    """Scripted functions, whose operations no function mode sees, go through `call`."""
    kind: Any = torch.jit.ScriptFunction
    plain = kind.__call__

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        return call(function, plain.__get__(function), args, kwargs)

    kind.__call__ = called
    try:
        yield
    finally:
        kind.__call__ = plain


class taken_off:  # noqa: N801
    """Takes one function mode off the stack while a leaf runs; other modes (a default device) stay in force."""

    def __init__(self, mode: TorchFunctionMode) -> None:
        self._mode = mode
        self._place: int | None = None

    def __enter__(self) -> None:
        stack = _pop_all()
        if self._mode in stack:
            self._place = stack.index(self._mode)
            del stack[self._place]
        _push_all(stack)

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            stack = _pop_all()
            stack.insert(self._place, self._mode)
            _push_all(stack)


@contextmanager
def put_on(mode: TorchFunctionMode, place: int) -> Iterator[None]:
    """The mode is on the stack within the block, above `place` others."""
    stack = _pop_all()
    _push_all([*stack[:place], mode, *stack[place:]])
    try:
        yield
    finally:
        _pop_all()
        _push_all(stack)


def _put_back(attributes: dict[str, Any], before: Any) -> None:
    if before is _ABSENT:
        attributes.pop("forward", None)
    else:
        attributes["forward"] = before


def _routed(call: LeafCall, module: nn.Module, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(module, name, plain, args, kwargs)

    return forward


def _pop_all() -> list[Any]:
    """The stack of function modes, outermost first."""
    popped = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    return popped[::-1]


def _push_all(stack: list[Any]) -> None:
    for mode in stack:
        torch._C._push_on_torch_function_stack(mode)
