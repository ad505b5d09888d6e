"""What every rule needs to know of the array that it computes for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from pl_pipe.fusion.formulations import Call, Chooser, Formulation, Site
from pl_pipe.fusion.report import FusionReport
from pl_pipe.tensors.arrays import ArrayMode, Streams
from pl_pipe.tensors.arrays.fallback import per_variant


class Context:
    def __init__(self, width: int, *, streams: Streams, chooser: Chooser, report: FusionReport) -> None:
        self.width = width
        self.streams = streams
        self.chooser = chooser
        self.report = report
        self.mode: ArrayMode | None = None
        self.is_recorded = False
        """What runs will be replayed: nothing is computed only to find out about it."""

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
        else:
            site = Site(
                layer=self.report.layer,
                operation=operation,
                shapes=tuple(tuple(tensor.shape) for tensor in tensors),
                settings=settings,
                dtype=str(tensors[0].dtype),
                device=tensors[0].device.type,
                variants=self.width,
            )
            name = self.chooser.choose(site, ways)
        self.report.note(operation, name)
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
