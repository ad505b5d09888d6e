"""Several ways to compute one operation for all variants, and who picks among them. rule -> *formulations* -> torch.

Which is fastest depends on the device and the shapes; all give the same numbers. A chooser may time them (timing.py):
it is handed each as a function without arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Call = TypeVar("Call")

GROUPED = "grouped"
BATCHED = "batched matmul"
SHARED_INPUT = "shared input"
BRANCHES = "branches"


@dataclass(frozen=True)
class Site:
    """One place where variants are computed together: what a choice may depend on."""

    layer: str
    """The module's qualified name; empty outside of those that are watched."""
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    """In memory: variants first where the tensor is an array."""
    settings: tuple[Any, ...]
    """Strides, groups and the like."""
    dtype: str
    device: str
    variants: int
    strides: tuple[tuple[int, ...], ...] = ()
    trains: bool = False
    """Whether gradients are computed, too."""


@dataclass(frozen=True)
class Formulation(Generic[Call]):
    name: str
    compute: Callable[[Call], Any]
    applies: Callable[[Call], bool] = lambda _: True


class Chooser(Protocol):
    """Picks a formulation for each site."""

    def choose(self, site: Site, ways: Mapping[str, Callable[[], Any]]) -> str:
        """One of the names in `ways`; calling a way computes it, forward and, if the site trains, backward, and leaves
        nothing behind. A chooser that has a method `reason(site)` says in the report why it chose so."""


class Usual:
    """What is mostly quickest, without measuring.

    On a CPU core a grouped convolution takes a fifth to a third longer than as many plain ones, unless it is
    depthwise; a 1×1 convolution is up to seven times quicker as a batched matrix product.
    """

    def choose(self, site: Site, ways: Mapping[str, Callable[[], Any]]) -> str:
        if site.operation.startswith("conv") and SHARED_INPUT not in ways:
            if BATCHED in ways:
                return BATCHED
            is_depthwise = site.shapes[1][2] == 1
            if site.device == "cpu" and not is_depthwise:
                return BRANCHES
        return next(iter(ways))


class Preference(Usual):
    """The first applicable name of a list for each operation, otherwise the usual one."""

    def __init__(self, orders: Mapping[str, Sequence[str]]) -> None:
        self._orders = dict(orders)

    def choose(self, site: Site, ways: Mapping[str, Callable[[], Any]]) -> str:
        for name in self._orders.get(site.operation, ()):
            if name in ways:
                return name
        return super().choose(site, ways)
