"""torchmetrics objects of a pipeline: they add up on rank 0 alone, whoever has the numbers. step -> *calls* -> rank 0.

All ranks run the user's step, and so call its metrics. What they are called with is brought to the last stage. On
rank 0, in its turn, they are the user's own. Elsewhere a call leaves no trace: it computes with ghosts, or with the
numbers of a batch that a replica of the last stage has; then the calls are noted, and rank 0 makes them again.

A collection is called as a whole. Its metrics share their state, as soon as it has compared the numbers of its first
call; ranks without numbers would find all alike, and leave out calls that rank 0 needs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_pipe.tensors.trees import map_tensors

_CALLED = ("forward", "update", "reset")
_SYNCED = ("sync_on_compute", "_to_sync")
_COPIED = "__reduce_ex__"  # `copy` and `pickle` look for it on the object first
_Called: TypeAlias = Metric | MetricCollection


@dataclass(frozen=True)
class MetricName:
    """Stands for a metric on its way to another rank."""

    name: str


@dataclass(frozen=True)
class MetricCall:
    """`metric(*args)` or `metric.update(*args)`."""

    name: str
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MetricCalls:
    """The metrics of a module, until `close`."""

    def __init__(self, module: nn.Module, *, reports: bool) -> None:
        self._parts = {name: part for name, part in module.named_modules() if isinstance(part, _Called)}
        self._names = {id(part): name for name, part in self._parts.items()}
        self._reports = reports
        self._bring: Callable[[Tensor], Tensor] | None = None
        self._of_last: Callable[..., Any] = _as_it_is
        self._noted: list[MetricCall] | None = None
        self._is_real, self._within = True, False
        self._share: Callable[[Any], Any] | None = None
        """In a hook: gives all ranks what rank 0 has."""
        self._alone: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._kept: dict[int, tuple[_Called, dict[str, Any]]] = {}
        """By id (a metric's hash changes with its state): the states of metrics whose calls do not count here."""
        metrics = [part for part in self._parts.values() if isinstance(part, Metric)]
        self._synced = [(metric, metric.sync_on_compute) for metric in metrics]
        self._plain: dict[tuple[str, str], Any] = {}
        for metric in metrics:
            vars(metric).update(dict.fromkeys(_SYNCED, False))  # only the rank that reports has anything to add up
        for name, part in self._parts.items():
            for method in (*_CALLED, "compute"):
                self._plain[name, method] = vars(part).get(method)
                vars(part)[method] = self._routed(name, part, method, getattr(part, method))
            vars(part)[_COPIED] = partial(self._reduced, name, part)

    def begin(
        self,
        *,
        is_real: bool,
        note: list[MetricCall] | None,
        bring: Callable[[Tensor], Tensor],
        of_last: Callable[..., Any],
    ) -> None:
        """A step begins: its calls count here, or are noted for the rank where they will."""
        self._is_real, self._noted, self._bring, self._of_last = is_real, note, bring, of_last

    def begin_hook(
        self,
        *,
        bring: Callable[[Tensor], Tensor],
        share: Callable[[Any], Any],
        alone: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        """A hook begins, in which all ranks see what metrics return on rank 0."""
        self._bring, self._share, self._alone = bring, share, alone

    def end(self) -> None:
        """The step is over: what it did to metrics where it does not count is undone."""
        self._is_real, self._noted, self._bring, self._share = True, None, None, None
        for part, state in self._kept.values():
            vars(part).clear()
            vars(part).update(state)
        self._kept.clear()

    def replay(self, calls: list[MetricCall]) -> None:
        """Makes calls that another rank has noted."""
        for call in calls:
            getattr(self._parts[call.name], call.method)(*call.args, **call.kwargs)

    def named(self, value: Any) -> Any:
        """The name of a metric, to be sent; other values are themselves."""
        return MetricName(self._names[id(value)]) if isinstance(value, Metric) else value

    def found(self, value: Any) -> Any:
        """The metric of a name that came."""
        return self._parts[value.name] if isinstance(value, MetricName) else value

    def close(self) -> None:
        for metric, synced in self._synced:
            vars(metric).update(dict.fromkeys(_SYNCED, synced))
        for (name, method), plain in self._plain.items():
            stored = vars(self._parts[name])
            stored.pop(method, None)
            if plain is not None:
                stored[method] = plain
        for part in self._parts.values():
            vars(part).pop(_COPIED, None)
        self._plain.clear()

    def _reduced(self, name: str, part: _Called, protocol: Any) -> Any:
        """For `copy` and `pickle`: a copy is a metric of its own, which nobody routes."""
        reduced: Any = type(part).__reduce_ex__(part, protocol)
        made, arguments, state, *rest = reduced
        own = {method: self._plain[name, method] for method in (*_CALLED, "compute")}
        own |= {key: synced for metric, synced in self._synced if metric is part for key in _SYNCED} | {_COPIED: None}
        state = {key: own.get(key, value) for key, value in state.items() if own.get(key) is not None or key not in own}
        return made, arguments, state, *rest

    def _routed(self, name: str, part: _Called, method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        if method == "compute":
            return lambda: self._computed(plain, is_collection=isinstance(part, MetricCollection))

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._share is not None and method != "reset":
                args, kwargs = map_tensors((args, kwargs), self._bring or _itself)
                return self._shared(partial(plain, *args, **kwargs))
            if self._bring is None or self._within:  # between steps, or the update within a metric's forward
                return plain(*args, **kwargs)
            args, kwargs = map_tensors((args, kwargs), self._bring)
            if self._noted is not None:
                self._noted.append(MetricCall(name, method, args, kwargs))
            if not self._is_real:
                self._keep(part)
            self._within = True
            try:
                names = list(part.keys()) if isinstance(part, MetricCollection) and method == "forward" else None
                return self._of_last(partial(plain, *args, **kwargs), names)
            finally:
                self._within = False

        return call

    def _keep(self, called: _Called) -> None:
        """Remembers a metric or collection, and those within it, as they stand before the step's first call of it."""
        parts = [part for part in called.modules() if isinstance(part, _Called) and id(part) not in self._kept]
        with torch._C.DisableTorchFunction():  # type: ignore[no-untyped-call]  # a copy for this rank, made by no step
            for part in parts:
                self._kept[id(part)] = part, {name: _copy(value) for name, value in vars(part).items()}
        if isinstance(called, MetricCollection):
            called._enable_compute_groups = False  # it would take metrics for equal that have seen one batch alike

    def _shared(self, call: Callable[[], Any]) -> Any:
        """What a call within a hook returns on rank 0, on every rank."""
        assert self._share is not None
        share, self._share = self._share, None
        try:
            with self._alone():
                return share(call() if self._reports else None)
        finally:
            self._share = share

    def _computed(self, plain: Callable[[], Any], *, is_collection: bool) -> Any:
        """On a rank that does not report, a metric has nothing to compute from."""
        if self._share is not None:
            return self._shared(plain)
        if self._within or not self._is_real or self._reports or is_collection:
            return plain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a metric that is asked before it was updated
            try:
                return plain()
            except Exception:  # such as: no samples to concatenate
                return torch.tensor(torch.nan)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _as_it_is(call: Callable[[], Any], names: Any = None) -> Any:  # noqa: ARG001
    return call()


@contextmanager
def metrics_apart(module: nn.Module) -> Iterator[None]:
    """Within the block metrics do not ask other ranks, which may not be running the step."""
    metrics = [(part, part.sync_on_compute) for part in module.modules() if isinstance(part, Metric)]
    for metric, _ in metrics:
        metric.sync_on_compute = metric._to_sync = False
    try:
        yield
    finally:
        for metric, synced in metrics:
            vars(metric).update(dict.fromkeys(_SYNCED, synced))


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
