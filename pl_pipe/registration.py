"""Makes our strategies known to Lightning by name, without importing Lightning.

`import pl_pipe` must stay quick, because commands that only plan need neither torch nor Lightning. So the names are
registered when Lightning's strategies are imported: now, if they have been, or else right after.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_STRATEGIES = "lightning.pytorch.strategies"
_NAMES = {
    "pipedream": ("PipeDreamStrategy", "PipeDream's 1F1B pipeline, profiled and partitioned"),
    "fusion": ("FusionStrategy", "variants of one model trained as one array"),
    "adaptive": ("AdaptiveCommStrategy", "data parallel over a topology that adapts to its links"),
    "data_parallel": ("DataParallelStrategy", "data parallel with a choice of synchronizers"),
    "partial_reduce": ("PartialReduceStrategy", "averaging with whoever is ready"),
    "ad_psgd": ("ADPSGDStrategy", "asynchronous averaging in pairs"),
    "sdpipe": ("SDPipeStrategy", "several pipelines, whose stages average with whoever is ready"),
    "hetpipe": ("HetPipeStrategy", "waves, a parameter server, and a bound on the distance of workers"),
}
"""The class of each in `pl_pipe.strategies`, and what it is."""


def register_strategies() -> None:
    """Calling it again changes nothing."""
    module = sys.modules.get(_STRATEGIES)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(module: ModuleType) -> None:
    registry: Any = module.StrategyRegistry
    for name, (class_name, description) in _NAMES.items():
        if name not in registry:
            registry.register(name, _maker(class_name), description=description)


def _maker(class_name: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return getattr(importlib.import_module("pl_pipe.strategies"), class_name)(**settings)

    return make


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of Lightning's strategies; the import itself is left to the usual finders."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run: Any = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
