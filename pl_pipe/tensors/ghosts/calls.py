"""One operation as it is called: function, arguments, the tensors among them and their values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pl_pipe.tensors.ghosts.kinds import INDEXING, Kind, Operation
from pl_pipe.tensors.ghosts.values import Value
from pl_pipe.tensors.operations import FREE_OUTPUTS

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MASKS = (torch.bool, torch.uint8)


@dataclass(slots=True)
class Call:
    function: Callable[..., Any]
    operation: Operation
    arguments: Arguments
    tensors: list[Tensor]
    values: list[Value | None]
    """Of the tensors; None for what every rank has."""
    structure: Any
    """The arguments without their tensors."""
    identity: Any
    """Equal for calls of the same function, where the function object itself may be made anew at every call."""

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def is_shaped_by_free_values(self) -> bool:
        """Whether the result's shape follows from the values of tensors that every rank has."""
        if self.name in FREE_OUTPUTS:
            return True
        if self.name == "repeat_interleave":
            return len(self.tensors) > 1 and self.values[1] is None
        return self.name in INDEXING and any(
            value is None and tensor.dtype in _MASKS for tensor, value in zip(self.tensors, self.values, strict=True)
        )

    @property
    def is_shaped_by_ghosts(self) -> bool:
        """Whether the result's shape depends on values that some ranks do not have."""
        if self.name == "repeat_interleave":
            return len(self.tensors) > 1 and self.values[1] is not None
        if self.name in INDEXING:
            indices = zip(self.tensors[1:], self.values[1:], strict=True)
            return any(value is not None and tensor.dtype in _MASKS for tensor, value in indices)
        return self._is_shaped_by_values

    @property
    def depends_on_free_values(self) -> bool:
        """The same of an operation on nothing but free tensors."""
        if self.name in INDEXING:
            return any(tensor.dtype in _MASKS for tensor in self.tensors[1:])
        return self._is_shaped_by_values

    @property
    def _is_shaped_by_values(self) -> bool:
        if self.name == "where":  # of a condition alone it is `nonzero`
            args, kwargs = self.arguments
            return len(args) + len(kwargs) == 1
        return self.operation.kind is Kind.SHAPED_BY_VALUES

    @property
    def needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)
