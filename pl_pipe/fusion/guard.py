"""Attributes of the root that differ between variants must not be read while its forward runs once for all."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from pl_pipe.errors import FusionError
from pl_pipe.tensors.operations import user_line


class Guard:
    def __init__(self, module: nn.Module, attributes: Sequence[str]) -> None:
        self._module = module
        self._plain = type(module)
        guarded = {attribute: _refusing(attribute) for attribute in attributes}
        self._guarded = type(self._plain.__name__, (self._plain,), guarded) if attributes else self._plain

    @contextmanager
    def standing(self) -> Iterator[None]:
        self._module.__class__ = self._guarded
        try:
            yield
        finally:
            self._module.__class__ = self._plain


def _refusing(attribute: str) -> Any:
    def read(_: nn.Module) -> Any:
        raise FusionError(
            f"{user_line()}: the forward reads {attribute!r}, which differs between the variants, but runs once for "
            "all of them; use it in a module of its own (nn.Dropout for a probability), which then runs once a variant"
        )

    def write(module: nn.Module, value: Any) -> None:
        vars(module)[attribute] = value

    return property(read, write)
