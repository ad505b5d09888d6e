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

_HYPER_PARAMETERS = ("_hparams", "_hparams_initial")
_DIFFERING = ("optimizers", "lr_schedulers")
_ABSENT = object()


class SettingsGuard:
    """Over the hyper-parameters, optimizer and schedulers of the first module; attributes are the array's to guard."""

    def __init__(self, modules: Sequence[L.LightningModule], turns: VariantTurns) -> None:
        self._modules = list(modules)
        self._turns = turns
        self._hyper_parameters: dict[str, frozenset[str]] = {}
        self._compared_at: int | None = None

    @contextmanager
    def standing(self) -> Iterator[None]:
        if self._compared_at != self._turns.taken:  # hooks may set hyper-parameters, too
            self._compared_at = self._turns.taken
            self._hyper_parameters = {name: _differing(name, self._modules) for name in _HYPER_PARAMETERS}
        stored = vars(self._modules[0])
        before = {name: stored[name] for name in (*_HYPER_PARAMETERS, *_DIFFERING) if name in stored}
        for name, differing in self._hyper_parameters.items():
            if differing and name in stored:
                stored[name] = _Guarded(before[name], differing)
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


def _differing(name: str, modules: Sequence[L.LightningModule]) -> frozenset[str]:
    first, *others = (vars(module).get(name) or {} for module in modules)
    names = {str(key) for hparams in (first, *others) for key in hparams}
    return frozenset(
        key for key in names if any(not alike(first.get(key, _ABSENT), other.get(key, _ABSENT)) for other in others)
    )


class _Guarded(AttributeDict):
    """Hyper-parameters of which some are not to be read, one by one or with all others."""

    def __init__(self, values: Mapping[str, Any], refused: frozenset[str]) -> None:
        super().__init__(values)
        object.__setattr__(self, "_refused", refused)

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def __getattr__(self, key: str) -> Any:
        self._check(key)
        return super().__getattr__(key)

    def __contains__(self, key: Any) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        """Python copies a dictionary without asking for its items, unless it has an iterator of its own."""
        return iter(list(super().keys()))

    def get(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._check(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._check(key)
        return super().setdefault(key, default)

    def popitem(self) -> Any:
        self._check_all()
        return super().popitem()

    def items(self) -> Any:
        self._check_all()
        return super().items()

    def values(self) -> Any:
        self._check_all()
        return super().values()

    def copy(self) -> Any:
        self._check_all()
        return super().copy()

    def __eq__(self, other: object) -> bool:
        self._check_all()
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def _check_all(self) -> None:
        self._check(*object.__getattribute__(self, "_refused"))

    def _check(self, *keys: Any) -> None:
        for key in keys:
            if key in object.__getattribute__(self, "_refused"):
                _refuse(f"the hyper-parameter {key!r}", "differs between the variants")
