"""Makes our strategies known to Lightning by name, without importing Lightning.

`import pl_pipe` must stay quick, because commands that only plan need neither torch nor Lightning. So the names are
registered when Lightning's strategies are imported: now, if they have been, or else right after.

Lightning is installed under two names, as two copies whose classes know nothing of each other. `pytorch_lightning`,
where it is imported after this package, is another name for `lightning.pytorch`, so that libraries and scripts which
use it can be given our strategies.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pl_pipe.errors import OTHER_LIGHTNING, ConfigError

_STRATEGIES = "lightning.pytorch.strategies"
_OLD_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
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
_NO_TRAINER = (
    "pl-pipe's strategies run the training_step of a LightningModule, and Fabric has loops of its own; give them to "
    "lightning.Trainer(strategy=...)"
)


def register_strategies() -> None:
    """Calling it again changes nothing."""
    module = sys.modules.get(_STRATEGIES)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None and other is not module:
        _register_refusal(other.StrategyRegistry, OTHER_LIGHTNING)
    imported = _OLD_NAMES.keys() & sys.modules.keys()
    if not imported and not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())


def _register(module: ModuleType) -> None:
    registry: Any = module.StrategyRegistry
    for name, (class_name, description) in _NAMES.items():
        if name not in registry:
            registry.register(name, _maker(class_name), description=description)
    _register_refusal(importlib.import_module("lightning.fabric.strategies").STRATEGY_REGISTRY, _NO_TRAINER)


def _register_refusal(registry: Any, words: str) -> None:
    def refuse(**_: Any) -> Any:
        raise ConfigError(words)

    for name, (_, description) in _NAMES.items():
        if name not in registry:
            registry.register(name, refuse, description=description)


def _maker(class_name: str) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        return getattr(importlib.import_module("pl_pipe.strategies"), class_name)(**settings)

    return make


class _OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the modules of `lightning` to whoever imports them under their old names."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package not in _OLD_NAMES or not _same_versions():
            return None
        real = importlib.import_module(_OLD_NAMES[package] + (f".{rest}" if rest else ""))
        return importlib.machinery.ModuleSpec(name, self, loader_state=(real, real.__spec__))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = spec.loader_state[0]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run under its own name, by which it goes on to be known."""
        assert module.__spec__ is not None
        assert module.__spec__.loader_state is not None
        module.__spec__ = module.__spec__.loader_state[1]


def _same_versions() -> bool:
    try:
        return importlib.metadata.version("pytorch-lightning") == importlib.metadata.version("lightning")
    except importlib.metadata.PackageNotFoundError:
        return False


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
