"""Partial fusion: a module that runs once a variant, and its results put together again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from pl_pipe.errors import FusionError
from pl_pipe.fusion.context import Context
from pl_pipe.fusion.stacking import StackedBuffer, StackedParameter
from pl_pipe.fusion.values import stacked
from pl_pipe.tensors.arrays import is_array
from pl_pipe.tensors.arrays.fallback import copies_of, together
from pl_pipe.tensors.arrays.mode import PER_VARIANT
from pl_pipe.tensors.lineage import version
from pl_pipe.tensors.places import put_parameter
from pl_pipe.tensors.trees import map_tensors, tensors_in


class Slices:
    """Parameters of one variant as parts of the stacked ones, so that gradients go there."""

    def __init__(self, state: Sequence[StackedParameter | StackedBuffer]) -> None:
        self._of_place: dict[tuple[int, str], StackedParameter | StackedBuffer] = {}
        for one in state:
            for of_one in one.places:
                self._of_place.update({(id(module), attribute): one for module, attribute in of_one})

    @contextmanager
    def shown(self, module: nn.Module, variant: int, split: dict[int, Sequence[Tensor]]) -> Iterator[None]:
        """`split` remembers, from variant to variant, the parts: one split has one backward."""
        before: list[tuple[nn.Module, str, Tensor]] = []
        kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        try:
            for part in module.modules():
                for attribute, parameter in part._parameters.items():
                    if parameter is not None and (id(part), attribute) in self._of_place:
                        before.append((part, attribute, parameter))
                for attribute, buffer in part._buffers.items():
                    if buffer is not None and (id(part), attribute) in self._of_place:
                        own = self._of_place[id(part), attribute].own[variant]
                        kept.append((part, attribute, buffer, own))
            for part, attribute, _ in before:
                whole = self._of_place[id(part), attribute]
                if id(whole) not in split:
                    split[id(whole)] = whole.tensor.unbind(0)
                put_parameter(part, attribute, split[id(whole)][variant])
            for part, attribute, _, own in kept:
                part._buffers[attribute] = own
            yield
            for part, attribute, _ in before:
                self._take_replaced(part, attribute, variant, split)
        finally:
            for part, attribute, tensor in before:
                put_parameter(part, attribute, tensor)
            for part, attribute, buffer, own in kept:
                found = part._buffers.get(attribute)
                if found is not None and found is not own:
                    own.data.copy_(found.detach())
                part._buffers[attribute] = buffer

    def _take_replaced(self, part: nn.Module, attribute: str, variant: int, split: dict[int, Sequence[Tensor]]) -> None:
        """`parameter.data = …` and a new parameter in its place are written into the variant's own."""
        whole = self._of_place[id(part), attribute]
        shown, found = split[id(whole)][variant], part._parameters.get(attribute)
        mine = whole.tensor.detach()[variant]
        if found is None or (found is shown and found.data_ptr() == mine.data_ptr()):
            return
        if found.shape != mine.shape or found.dtype != mine.dtype:
            raise FusionError(
                f"the forward gives {whole.name} the shape {list(found.shape)}, and an array has one shape"
            )
        whole.tensor.data[variant].copy_(found.detach())


class Apart:
    """A module that runs once a variant: each variant's own module, on its slices."""

    def __init__(self, name: str, why: str, modules: Sequence[nn.Module], state: Slices) -> None:
        self.name = name
        self.why = why
        self._modules = list(modules)
        self.slices = state
        self._in_place: dict[bool, bool] = {}
        """Whether it writes to what it is given, in training and otherwise; the first time, nobody knows."""
        self._is_said_to = any(getattr(part, "inplace", False) for part in modules[0].modules())

    def __call__(self, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any], *, whole: bool) -> Any:
        """`whole`: with the module's hooks, not its forward alone."""
        context.report.note(type(self._modules[0]).__name__, PER_VARIANT, self.why)
        training = self._modules[0].training
        assumed = self._is_said_to if context.is_recorded else True
        given = _Given(self._in_place.get(training, assumed), len(self._modules))
        split_state: dict[int, Sequence[Tensor]] = {}
        outs = []
        for variant, module in enumerate(self._modules):
            args_of_one, kwargs_of_one = map_tensors((args, kwargs), partial(given.part, variant=variant))
            with self.slices.shown(module, variant, split_state), context.streams.turn(variant):
                call: Callable[..., Any] = module._call_impl if whole else module.forward
                outs.append(call(*args_of_one, **kwargs_of_one))
        given.write_back(self.name)
        if not context.is_recorded:
            self._in_place.setdefault(training, given.was_written)
        return _together(outs, self.name)


class _Given:
    """The tensors that a module is called with, variant by variant."""

    def __init__(self, in_place: bool, width: int) -> None:
        self._in_place = in_place
        self._width = width
        self._parts: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self.was_written = False

    def part(self, tensor: Tensor, variant: int) -> Tensor:
        if not is_array(tensor) and not self._in_place:
            self._versions.setdefault(id(tensor), (tensor, version(tensor)))
            return tensor
        if id(tensor) not in self._parts:
            if not self._in_place:
                parts: Sequence[Tensor] = tensor.unbind(0)
            else:
                parts = copies_of(tensor if is_array(tensor) else tensor.expand(self._width, *tensor.shape))
            self._parts[id(tensor)] = tensor, parts
        return self._parts[id(tensor)][1][variant]

    def write_back(self, name: str) -> None:
        """What the module changed in place is changed for its caller, too, as by one variant alone."""
        if any(version(tensor) != before for tensor, before in self._versions.values()):
            raise FusionError(
                f"{name} writes in place to a tensor that all variants share, and the next one saw it changed; write "
                "to a copy of it (`.clone()`)"
            )
        for tensor, parts in self._parts.values():
            if not self._in_place or not any(one.is_inference() or version(one) for one in parts):
                continue
            self.was_written = True
            if is_array(tensor):
                tensor.copy_(torch.stack(tuple(parts)))
            elif all(torch.equal(parts[0], one) for one in parts[1:]):
                tensor.copy_(parts[0])
            else:
                raise FusionError(
                    f"{name} writes other numbers for each variant to a tensor that they all share; write to a copy "
                    "of it (`.clone()`)"
                )


def _together(outs: Sequence[Any], name: str) -> Any:
    opaque = any(not isinstance(value, Tensor) and tensors_in(value) for value in tree_flatten(outs[0])[0])
    return stacked(outs) if opaque else together(outs, name)
