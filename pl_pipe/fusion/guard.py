"""Attributes that differ between variants must not be read while one module's Python runs for all of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from pl_pipe.errors import FusionError
from pl_pipe.tensors.operations import user_line

_OF_METRICS = frozenset(("update", "compute", "reset"))


class Guards:
    """Over the first variant's modules; a module that runs once a variant may read its own (`is_apart`)."""

    def __init__(
        self, template: nn.Module, differing: Mapping[str, Sequence[str]], is_apart: Callable[[], bool]
    ) -> None:
        self._guards = []
        for name, attributes in differing.items():
            module = template.get_submodule(name)
            guarded = [attribute for attribute in attributes if not _is_a_metrics(module, attribute)]
            if guarded:
                self._guards.append(_Guard(module, name, guarded, is_apart))

    @contextmanager
    def standing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for guard in self._guards:
                stack.enter_context(guard.standing())
            yield


class _Guard:
    def __init__(self, module: nn.Module, name: str, attributes: Sequence[str], is_apart: Callable[[], bool]) -> None:
        self._module = module
        self._plain = type(module)
        guarded = {
            attribute: _refusing(self._plain, attribute, f"{name}.{attribute}" if name else attribute, is_apart)
            for attribute in attributes
        }
        same = {"__module__": self._plain.__module__, "__qualname__": self._plain.__qualname__}
        self._guarded = type(self._plain.__name__, (self._plain,), {**guarded, **same})

    @contextmanager
    def standing(self) -> Iterator[None]:
        self._module.__class__ = self._guarded
        try:
            yield
        finally:
            self._module.__class__ = self._plain


def _is_a_metrics(module: nn.Module, attribute: str) -> bool:
    """What metrics count in, and how: each variant's own are called."""
    if not isinstance(module, Metric | MetricCollection):
        return False
    states = module._defaults if isinstance(module, Metric) else ()
    return attribute.startswith("_") or attribute in _OF_METRICS or attribute in states


def _refusing(plain: type, attribute: str, said: str, is_apart: Callable[[], bool]) -> Any:
    of_class = next((vars(kind)[attribute] for kind in plain.__mro__ if attribute in vars(kind)), None)
    users = of_class if hasattr(of_class, "__set__") else None  # a property of their own, which stands over a value

    def read(module: nn.Module) -> Any:
        if not is_apart():
            raise FusionError(
                f"{user_line()}: the forward reads {said!r}, which differs between the variants, but runs once for "
                "all of them; use it in a module of its own (nn.Dropout for a probability), which then runs once a "
                "variant"
            )
        if users is not None:
            return users.__get__(module, plain)
        if attribute in vars(module):
            return vars(module)[attribute]
        if of_class is not None:
            return of_class.__get__(module, plain) if hasattr(of_class, "__get__") else of_class
        raise AttributeError(f"{plain.__name__!r} object has no attribute {attribute!r}")

    def write(module: nn.Module, value: Any) -> None:
        if users is not None:
            users.__set__(module, value)
        else:
            vars(module)[attribute] = value

    def delete(module: nn.Module) -> None:
        vars(module).pop(attribute, None)

    return property(read, write, delete)
