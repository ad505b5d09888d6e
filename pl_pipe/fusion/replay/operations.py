"""A step's operations in their order, while it runs. step -> *operations* -> the same as another variant's, or not.

Writing them down as a graph takes seconds; to see that they are those of a graph that is there takes hardly longer than
to run them. Compared are operations, numbers, shapes, and which earlier tensor each argument and each result is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay.draws import shift_of
from pl_pipe.fusion.replay.graph_facts import is_torchs
from pl_pipe.tensors.operations import user_line

Operation = tuple[Any, ...]


class OperationsDifferError(Exception):
    """The steps of two variants are not the same."""


class Operations(TorchDispatchMode):
    """Within the block operations are noted, and compared with those that are expected, if any are."""

    supports_higher_order_operators = True

    def __init__(
        self,
        known: Sequence[Tensor],
        expected: Sequence[Operation] | None = None,
        random_state: Callable[[], Tensor] | None = None,
    ) -> None:
        """`known` are tensors that are there before: each variant has its own, at the same place of this list. With
        `random_state`, operations are noted that draw and do not say so."""
        super().__init__()
        self.found: list[Operation] = []
        self.shifts: list[int] = []
        """Of what dropouts are given."""
        self.unsaid: list[str] = []
        """Operations that draw without a word."""
        self._random_state = random_state
        self._expected = expected
        self._places: dict[int, object] = {}
        """By address, the last tensor that was found there; one that lives has it for itself and its views."""
        self._count = 0
        for tensor in known:
            if _has_address(tensor) and tensor.data_ptr() in self._places:
                self._places[tensor.data_ptr()] = object()  # it could be either: like nothing else
            else:
                self._number(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _has_sizes_of_numbers(func, args):
            raise FusionError(
                f"{user_line()}: the step has shapes that depend on numbers ({func}), a replay has those of the first"
            )
        if iskeyword(getattr(func, "_overloadname", "")):  # torch would write it into Python
            raise FusionError(f"{user_line()}: the step calls {func}, which cannot be written down")
        leaves, structure = tree_flatten((args, kwargs or {}))
        self._note((func, structure, *map(self._described, leaves)))
        if func is torch.ops.aten.native_dropout.default:
            self.shifts.append(shift_of(args[0]))  # also of one that fails: the graph has it too
        with self._noting_draws(func):
            out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._number(one)
        return out

    @contextmanager
    def _noting_draws(self, func: Any) -> Iterator[None]:
        is_said = is_torchs(func) or torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if self._random_state is None or is_said:
            yield
            return
        with _disable_current_modes():
            before = self._random_state()
        yield
        with _disable_current_modes():
            if not torch.equal(self._random_state(), before):
                self.unsaid.append(str(func))

    def end(self, results: Sequence[Tensor]) -> None:
        """After the block, with what the step is to give."""
        self._note(("results", *map(self._described, results)))
        if self._expected is not None and len(self.found) != len(self._expected):
            raise OperationsDifferError

    def _note(self, operation: Operation) -> None:
        place = len(self.found)
        self.found.append(operation)  # where a step catches the error, it has one too many
        if self._expected is not None and self._expected[place : place + 1] != [operation]:
            raise OperationsDifferError

    def _described(self, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, Tensor):
            return type(value), value
        kind = value.dtype, value.device, value.layout, value.shape
        if value.layout != torch.strided:
            return (*kind, object())  # which one it is cannot be told
        return (*kind, value.stride(), self._places.get(value.data_ptr()) if value.numel() else None)

    def _number(self, tensor: Tensor) -> None:
        self._count += 1
        if _has_address(tensor):
            self._places[tensor.data_ptr()] = self._count


def _has_sizes_of_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Masked selections and the like; of indexing, that by masks."""
    if torch.Tag.dynamic_output_shape not in getattr(func, "tags", ()):
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _has_address(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0
