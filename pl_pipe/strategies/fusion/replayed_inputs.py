"""What a recorded step is given anew: the batch and the factors of the losses. call -> *inputs* -> recorded parts.

A replay reads from the same memory each time, so a batch is copied in; one that differs in more than its numbers is
another step.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pl_pipe.errors import FusionError
from pl_pipe.strategies.fusion.step_formulation import Members, StepCall
from pl_pipe.tensors.kept_tensor import cloned_alike
from pl_pipe.tensors.lineage import is_strided
from pl_pipe.tensors.trees import tensors_in

_SIMPLE = (int, float, str, bool, type(None))
_LARGE = 2**20
"""Bytes, of which a kernel for many tensors would make too few blocks for a GPU (6 us longer for 6 MB on an H200)."""


class ReplayedInputs:
    """Tensors that stay where they are from the first step on."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.batch: list[Tensor] = []
        self.scales = torch.zeros(0)
        self._factors: list[Any] = []

    def load(self, call: StepCall) -> None:
        given = tensors_in(call.args)
        if not self.batch:
            self.batch = [cloned_alike(tensor.detach()) for tensor in given]
        else:
            pairs = zip(self.batch, given, strict=True)
            copy_at_once([(static, tensor) for static, tensor in pairs if static.data_ptr() != tensor.data_ptr()])
        self.set_scales(call)

    def set_scales(self, call: StepCall) -> None:
        factors = list(call.scales)
        if not self.scales.numel():
            dtype = next(self._members.modules[0].parameters()).dtype
            kind = torch.float64 if dtype == torch.float64 else torch.float32
            self.scales = torch.ones(len(factors), dtype=kind, device=self._members.device)
            self._factors = [1.0] * len(factors)
        for place, factor in enumerate(factors):
            if isinstance(factor, Tensor):
                self.scales[place].copy_(factor)
            elif factor != self._factors[place]:
                self.scales[place].fill_(factor)
        self._factors = factors


def copy_at_once(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Into the first of each pair. Small tensors of one type take one kernel, where the GPU's copy engines would copy
    one after another while everything else waits for the next replay; large ones fill the GPU by themselves."""
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for to, given in pairs:
            if to.nbytes >= _LARGE:
                to.copy_(given, non_blocking=True)
            else:
                alike.setdefault(to.dtype, []).append((to, given))
        for of_type in alike.values():
            torch._foreach_copy_([to for to, _ in of_type], [given for _, given in of_type], non_blocking=True)


def recording_key(call: StepCall) -> tuple[Any, ...]:
    """What must be the same for a recording to hold: shapes, names, and all that is no tensor, but for the batch's
    number."""
    tensors = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_in(call.args))
    leaves, structure = tree_flatten((call.args[:1], call.kwargs))
    others = tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor))
    if not all(isinstance(leaf, _SIMPLE) for leaf in others):
        kind = next(type(leaf).__name__ for leaf in others if not isinstance(leaf, _SIMPLE))
        raise FusionError(f"the batch holds a {kind}, which a recording cannot compare with the next one's")
    return tensors, others, str(structure)  # by which keys in another order differ


def refuse_other_tensors(call: StepCall, device: torch.device) -> None:
    for tensor in tensors_in(call.args):
        if not is_strided(tensor):
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise FusionError(f"the batch has a tensor that is {kind}, which a replay cannot be given")
        if tensor.device != device:
            raise FusionError(f"the batch has a tensor on {tensor.device}, and a replay reads from {device} alone")
