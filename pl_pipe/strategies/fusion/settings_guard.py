"""What is each variant's own must not be read while one module's Python runs for all of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import AttributeDict

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import alike
from pl_pipe.strategies.fusion.variant_turns import VariantTurns
from pl_pipe.tensors.operations import user_line

_HYPER_PARAMETERS = "_hparams"
_DIFFERING = ("optimizers", "lr_schedulers")


class SettingsGuard:
    """Over the hyper-parameters, optimizer and schedulers of the first module; attributes are the array's to guard."""

    def __init__(self, modules: Sequence[L.LightningModule], turns: VariantTurns) -> None:
        self._first = modules[0]
        self._turns = turns
        self._hyper_parameters = _differing_hyper_parameters(modules)

    @contextmanager
    def standing(self) -> Iterator[None]:
        stored = vars(self._first)
        before = {name: stored[name] for name in (_HYPER_PARAMETERS, *_DIFFERING) if name in stored}
        if self._hyper_parameters and _HYPER_PARAMETERS in stored:
            stored[_HYPER_PARAMETERS] = _Guarded(before[_HYPER_PARAMETERS], self._hyper_parameters)
        for name in _DIFFERING:
            stored[name] = lambda *_, name=name, **__: _refuse(f"self.{name}()", "is each variant's own")
        try:
            with self._turns.nobodys():
                yield
        finally:
            for name in _DIFFERING:
                stored.pop(name, None)
            stored.update(before)


def _refuse(what: str, why: str) -> Any:
    raise FusionError(f"{user_line()}: the step reads {what}, which {why}, but runs once for all of them")


def _differing_hyper_parameters(modules: Sequence[L.LightningModule]) -> frozenset[str]:
    first, *others = (module.hparams for module in modules)
    names = {str(name) for hparams in (first, *others) for name in hparams}
    return frozenset(name for name in names if any(not alike(first.get(name), other.get(name)) for other in others))


class _Guarded(AttributeDict):
    """Hyper-parameters of which some are not to be read."""

    def __init__(self, values: Mapping[str, Any], refused: frozenset[str]) -> None:
        super().__init__(values)
        object.__setattr__(self, "_refused", refused)

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str) -> Any:
        self._check(key)
        return super().__getattr__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def items(self) -> Any:
        self._check(*self)
        return super().items()

    def values(self) -> Any:
        self._check(*self)
        return super().values()

    def _check(self, *keys: Any) -> None:
        for key in keys:
            if key in object.__getattribute__(self, "_refused"):
                _refuse(f"the hyper-parameter {key!r}", "differs between the variants")
