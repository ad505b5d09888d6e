"""The function mode under which array tensors look like one variant's. user's forward -> *mode* -> torch.

What is tried for an operation, in turn:

    a question about shapes      answered as for one variant
    a number that Python reads   must be the same for all
    a rule of the fusion         grouped convolution, batched matrix product, …
    a table                      element-wise, shifted dimensions, folded variants
    vmap                         everything that torch has a rule for
    one call a variant           the rest, with a note that says where
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from pl_pipe.tensors.arrays.elementwise import ELEMENTWISE, elementwise
from pl_pipe.tensors.arrays.fallback import per_variant, together, vmapped
from pl_pipe.tensors.arrays.folded import FOLDED, folded
from pl_pipe.tensors.arrays.indexing import read_at, write_at
from pl_pipe.tensors.arrays.looks import look
from pl_pipe.tensors.arrays.marks import Rule, arrays_among, mark_made, shared
from pl_pipe.tensors.arrays.products import PRODUCTS, product
from pl_pipe.tensors.arrays.reads import read
from pl_pipe.tensors.arrays.shifted import SHIFTED, shifted
from pl_pipe.tensors.arrays.streams import Streams
from pl_pipe.tensors.arrays.writes import refuse_copied_view, refuse_gradient, refuse_target, widen_target
from pl_pipe.tensors.ghosts.kinds import Kind, Operation, operation_of, property_name
from pl_pipe.tensors.interception import taken_off
from pl_pipe.tensors.lineage import storage_key
from pl_pipe.tensors.operations import user_line

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_functorch: Any = torch._C._functorch
_FIRST = ("input", "self", "tensor")
PER_VARIANT = "per variant"
VMAP = "vmap"


class Notes(Protocol):
    """Hears how operations were computed, and says in which layer."""

    def note(self, operation: str, how: str, why: str = "") -> None: ...

    def part(self) -> str:
        """The innermost module whose forward is running, `layer3.attention`; empty for the outermost."""


class ArrayMode(TorchFunctionMode):
    """One run of the user's Python for `width` variants."""

    def __init__(self, width: int, *, rules: Mapping[Any, Rule], streams: Streams, notes: Notes) -> None:
        super().__init__()
        self._width = width
        self._rules = rules
        self._streams = streams
        self._notes = notes
        self._fallback_before = True
        self._thread = threading.get_ident()

    def __enter__(self) -> Self:
        self._fallback_before = _functorch._is_vmap_fallback_enabled()
        _functorch._set_vmap_fallback_enabled(False)  # its slow loop would hide from us that there is no rule
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _functorch._set_vmap_fallback_enabled(self._fallback_before)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        if not args and (operation.in_place or operation.kind in (Kind.LOOK, Kind.READ)):
            args, kwargs = _first_by_place(kwargs)
        if not arrays_among(args, kwargs):
            return self._shared(func, operation, args, kwargs)
        if operation.kind is Kind.LOOK:
            if operation.name == "__set__" and shared(args[0]):
                refuse_target(args[0], f"{property_name(func)} =", layer=self._notes.part)
            return look(func, operation.name, args, kwargs)
        if operation.kind is Kind.READ:
            return read(func, operation.name, args, kwargs, width=self._width, layer=self._notes.part)
        if operation.kind is Kind.GRADIENT:
            refuse_gradient(operation.name, layer=self._notes.part)
        if operation.in_place:
            if shared(args[0]):
                widen_target(args[0], operation.name, width=self._width, layer=self._notes.part)
            else:
                refuse_copied_view(args[0], operation.name, layer=self._notes.part)
        elif kwargs.get("inplace"):
            refuse_copied_view(args[0] if args else kwargs.get("input"), operation.name, layer=self._notes.part)
        return self._arrays(func, operation, args, kwargs)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """On again within a rule, for which it is off."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def custom_function(
        self,
        function: Any,
        plain: Callable[..., Any],
        args: Args,
        kwargs: Kwargs,
        what: str = "a custom autograd function",
    ) -> Any:
        """One that acts on what is in memory, unseen: it must have one variant's tensors."""
        if threading.get_ident() != self._thread or not arrays_among(args, kwargs):
            return plain(*args, **kwargs)
        name = str(getattr(function, "__name__", None) or getattr(function, "name", what))
        self._notes.note(name, PER_VARIANT, f"{user_line()}: {what}")
        with taken_off(self):
            return self._per_variant(plain, name, args, kwargs)

    def _arrays(self, func: Callable[..., Any], operation: Operation, args: Args, kwargs: Kwargs) -> Any:
        name = operation.name
        try:
            out = self._by_rule(func, args, kwargs)
            if out is NotImplemented:
                out = self._by_table(func, name, args, kwargs)
            if out is not NotImplemented:
                return out
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError) as error:  # the user's mistake, or a call we misread
            why = f"{user_line()}: {_first_line(error)}"
            return self._noted(func, operation, args, kwargs, why)
        if operation.kind is Kind.RANDOM and self._streams.own:
            return self._per_variant(func, name, args, kwargs, in_place=_is_in_place(operation, args, kwargs))
        if operation.kind is not Kind.SHAPED_BY_VALUES:
            try:
                out = vmapped(func, args, kwargs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # no rule, or the user's own mistake: one call a variant tells which
                why = f"{user_line()}: {_first_line(error)}"
            else:
                self._notes.note(name, VMAP)
                return args[0] if operation.in_place else out
        else:
            why = f"{user_line()}: its result's shape depends on values"
        return self._noted(func, operation, args, kwargs, why)

    def _noted(self, func: Callable[..., Any], operation: Operation, args: Args, kwargs: Kwargs, why: str) -> Any:
        in_place = _is_in_place(operation, args, kwargs)
        out = self._per_variant(func, operation.name, args, kwargs, in_place=in_place)
        self._notes.note(operation.name, PER_VARIANT, why)
        return out

    def _by_rule(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        rule = self._rules.get(func)
        return NotImplemented if rule is None else rule(*args, **kwargs)

    def _by_table(self, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
        out: Any = NotImplemented
        if name in ELEMENTWISE:
            out = elementwise(func, name, args, kwargs)
        if out is NotImplemented and name in SHIFTED:
            out = shifted(func, name, args, kwargs, self._width)
        elif name in FOLDED:
            out = folded(func, name, args, kwargs, self._width)
        elif name in PRODUCTS:
            out = product(name, args, kwargs)
        elif name == "__getitem__":
            out = read_at(*args)
        elif name == "__setitem__":
            return self._set_item(func, *args)
        elif name == "__iter__":
            return iter(shifted(Tensor.unbind, "unbind", args, {}, self._width))
        elif name.startswith("new_"):
            return self._new(func, args, kwargs)
        return out

    def _set_item(self, func: Callable[..., Any], target: Any, index: Any, value: Any) -> None:
        if not write_at(target, index, value):
            self._per_variant(func, "__setitem__", (target, index, value), {}, in_place=True)

    def _new(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """`x.new_zeros(…)` is about to be filled with a variant's numbers: an array from the start."""
        return together([func(*args, **kwargs) for _ in range(self._width)], "new")

    def _shared(self, func: Callable[..., Any], operation: Operation, args: Args, kwargs: Kwargs) -> Any:
        """No variant's numbers go in; only random numbers come out different."""
        if operation.kind is Kind.RANDOM and kwargs.get("generator") is None:
            out = self._by_rule(func, args, kwargs)
            if out is not NotImplemented:
                return out
            return self._drawn(func, operation, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not _is_part(out, args):
            mark_made(out)
        return out

    def _drawn(self, func: Callable[..., Any], operation: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Every variant draws its own."""
        if operation.in_place:
            widen_target(args[0], operation.name, width=self._width, layer=self._notes.part)
            return self._per_variant(func, operation.name, args, kwargs, in_place=True)
        return self._per_variant(func, operation.name, args, kwargs)

    def _per_variant(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        in_place: bool = False,
    ) -> Any:
        return per_variant(
            func,
            args,
            kwargs,
            width=self._width,
            streams=self._streams,
            name=name,
            in_place=in_place,
            layer=self._notes.part,
        )


def _is_in_place(operation: Operation, args: Args, kwargs: Kwargs) -> bool:
    return operation.in_place or bool(args and kwargs.get("inplace"))


def _first_by_place(kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The tensor that is looked at, or written to, where it was given by its name (`nn.init.normal_` does so)."""
    name = next((name for name in _FIRST if name in kwargs), None)
    return ((), kwargs) if name is None else ((kwargs[name],), {key: kwargs[key] for key in kwargs if key != name})


def _is_part(out: Tensor, args: Args) -> bool:
    """Whether a result is one of the arguments, or shares memory with one."""
    given = [value for value in args if isinstance(value, Tensor)]
    return bool(given) and storage_key(out) in {storage_key(value) for value in given}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
