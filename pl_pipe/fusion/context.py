"""What every rule needs to know of the array that it computes for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils._python_dispatch import _disable_current_modes

from pl_pipe.fusion.formulations import Call, Chooser, Formulation, Site
from pl_pipe.fusion.report import FusionReport
from pl_pipe.tensors.arrays import ArrayMode, Streams, is_array, mark
from pl_pipe.tensors.arrays.fallback import per_variant


class Context:
    def __init__(self, width: int, *, streams: Streams, chooser: Chooser, report: FusionReport) -> None:
        self.width = width
        self.streams = streams
        self.chooser = chooser
        self.report = report
        self.mode: ArrayMode | None = None
        self.is_recorded = False
        """What runs will be replayed: nothing may be recorded that was computed only to find out about it."""

    def formulate(
        self,
        operation: str,
        call: Call,
        formulations: Sequence[Formulation[Call]],
        tensors: Sequence[Tensor],
        settings: tuple[Any, ...] = (),
    ) -> Any:
        """Computes the call in the way that the chooser picks for it."""
        ways = {one.name: partial(one.compute, call) for one in formulations if one.applies(call)}
        if len(ways) == 1:
            (name,) = ways
            self.report.note(operation, name)
        else:
            trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            site = Site(
                layer=self.report.layer,
                operation=operation,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                settings=settings,
                dtype=_arithmetic(tensors[0]),
                device=tensors[0].device.type,
                variants=self.width,
                strides=tuple(tensor.stride() if tensor.layout == torch.strided else () for tensor in tensors),
                trains=trains,
            )
            name = self.chooser.choose(
                site, {one.name: partial(_tried, one, call) for one in formulations if one.name in ways}
            )
            reason = getattr(self.chooser, "reason", None)
            self.report.note(operation, name, "" if reason is None else reason(site))
        return ways[name]()

    def per_variant(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        name: str,
        in_place: bool = False,
    ) -> Any:
        return per_variant(
            function, args, kwargs or {}, width=self.width, streams=self.streams, name=name, in_place=in_place
        )

    @contextmanager
    def seen_by_operation(self) -> Iterator[None]:
        """Inside a rule the mode is off; here it is on again, and sees the operations one by one."""
        assert self.mode is not None
        with self.mode.resumed():
            yield


def _tried(formulation: Formulation[Any], call: Any) -> None:
    """Computes a way only to see how long it takes: neither recordings nor hooks of parameters hear of it."""
    with _disable_current_modes(), disable_autocast_cache():
        tensors = {name: _apart(value) for name, value in _fields(call).items() if isinstance(value, Tensor)}
        out = formulation.compute(replace(call, **tensors))
        given = [tensor for tensor in tensors.values() if tensor.requires_grad]
        if given and isinstance(out, Tensor) and out.requires_grad:
            torch.autograd.grad(out, given, out.detach(), allow_unused=True)


def _fields(call: Any) -> dict[str, Any]:
    return {one.name: getattr(call, one.name) for one in fields(call)}


def _apart(tensor: Tensor) -> Tensor:
    """The same numbers, without a past."""
    own = tensor.detach().requires_grad_(tensor.requires_grad)
    return mark(own) if is_array(tensor) else own


def _arithmetic(tensor: Tensor) -> str:
    kind = tensor.device.type
    autocast = f" as {torch.get_autocast_dtype(kind)}" if torch.is_autocast_enabled(kind) else ""
    return f"{tensor.dtype}{autocast}"
