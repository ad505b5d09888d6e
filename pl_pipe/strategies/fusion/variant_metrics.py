"""torchmetrics objects while one module runs for all variants: each variant's own is called with its own numbers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import lightning as L
from torch import nn
from torchmetrics import Metric, MetricCollection

from pl_pipe.fusion import VariantArray
from pl_pipe.fusion.values import split, stacked

_METHODS = ("update", "compute", "reset")  # a call of the metric itself is the array's to divide
Called: TypeAlias = Metric | MetricCollection


def metric_names(module: nn.Module) -> list[str]:
    """Of metrics and collections, but not of metrics within one of these."""
    found: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, Called) and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


class FusedMetrics:
    def __init__(self, modules: Sequence[L.LightningModule], array: VariantArray[L.LightningModule]) -> None:
        self._array = array
        names = metric_names(modules[0])
        self._of_all: list[list[Any]] = [[module.get_submodule(name) for module in modules] for name in names]

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Within the block, methods of the first module's metrics are called on all."""
        before: list[tuple[Any, str, Any]] = []
        for of_all in self._of_all:
            for method in _METHODS:
                before.append((of_all[0], method, vars(of_all[0]).get(method)))
                vars(of_all[0])[method] = self._on_all(of_all, method, getattr(of_all[0], method))
        try:
            yield
        finally:
            for metric, method, plain in reversed(before):
                vars(metric).pop(method, None)
                if plain is not None:
                    vars(metric)[method] = plain

    def _on_all(self, of_all: list[Any], method: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._array.runs_apart:  # the update within a metric's own call
                return plain(*args, **kwargs)
            with self._array.taken_apart():
                given = split((args, kwargs), len(of_all))
                outs = [
                    (plain if place == 0 else getattr(metric, method))(*given[place][0], **given[place][1])
                    for place, metric in enumerate(of_all)
                ]
                return None if outs[0] is None else stacked(outs)

        return call
