"""How the steps of all variants are computed: the port, and its plainest way. strategy -> *formulation* -> modules.

Every formulation gives the same numbers; which is quickest depends on the model and the device. A formulation computes
(forward, loss, backward); what a step logs is noted while it runs and said afterwards, so that computing may be
captured and replayed without the user's Python.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from pl_pipe.strategies.fusion.variant_log import VariantLog
from pl_pipe.strategies.fusion.variant_turns import VariantTurns
from pl_pipe.tensors.arrays import FollowedStreams
from pl_pipe.tensors.kept_tensor import cloned_alike, same_numbers
from pl_pipe.tensors.lineage import version
from pl_pipe.tensors.taken_memory import TakenMemory
from pl_pipe.tensors.trees import map_tensors, tensors_in

TRAINING = "training_step"


@dataclass
class StepCall:
    """One step, asked of all variants alike."""

    hook: str
    """`training_step`, `validation_step`, `test_step` or `predict_step`."""
    args: tuple[Any, ...]
    """The batch, and which one it is."""
    kwargs: dict[str, Any]
    context: Callable[[], AbstractContextManager[Any]]
    """The precision's: around forwards, not around backwards."""
    scales: Sequence[Tensor | float] = ()
    """For training: what each variant's loss is multiplied with (its share of an update, a GradScaler's factor)."""
    adds: bool = False
    """For training: gradients of several batches are added up."""
    updates: bool = False
    """For training: the optimizers step right after, and nobody looks at gradients before."""
    clear_gradients: Callable[[], None] | None = None
    """For training: takes back a backward that failed; absent where gradients of earlier batches are to be kept."""

    @property
    def adds_to_gradients(self) -> bool:
        """Those of earlier batches are there, and would be lost with a backward that fails."""
        return self.trains and self.clear_gradients is None

    @property
    def trains(self) -> bool:
        return self.hook == TRAINING

    @property
    def signature(self) -> tuple[Any, ...]:
        return tuple((_shape(tensor), tensor.dtype) for tensor in tensors_in(self.args))


@dataclass
class Members:
    """The variants that are computed together, and what they have in common. Shrinks when variants leave."""

    modules: list[L.LightningModule]
    log: VariantLog
    streams: FollowedStreams
    fuse_except: Sequence[str] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.turns = VariantTurns(self.streams)

    @property
    def is_one_as_usual(self) -> bool:
        """A single variant that draws from the process's generators needs no turns."""
        return len(self.modules) == 1 and self.streams.all_follow


class StepFormulation(Protocol):
    name: str

    def run(self, call: StepCall) -> list[Any]:
        """What each variant's step returned, detached; for training with every variant's gradients in place.

        Raises an exception where the step cannot be computed this way, and has then left no trace.
        """

    def keep(self, places: Sequence[int]) -> None:
        """Only these members, by place, stay; called after their list has shrunk."""

    def release(self) -> None:
        """It is not used any more."""


class OneByOne:
    """Each variant's step by itself, forward and backward: possible for every model, and takes the least memory."""

    name = "one by one"

    def __init__(self, members: Members) -> None:
        self._members = members
        self._batches = SharedBatches()

    def run(self, call: StepCall) -> list[Any]:
        members, outs = self._members, []
        if members.is_one_as_usual:
            return [self._run_one(call, members.modules[0])]
        python, numpy = random.getstate(), np.random.get_state()
        for place, module in enumerate(members.modules):
            if place:
                random.setstate(python)  # each draws as it would alone
                np.random.set_state(numpy)
            own = replace(call, args=self._batches.own(call.args)) if len(members.modules) > 1 else call
            with members.turns.turn(place):
                outs.append(self._run_one(own, module, place))
            self._batches.check(call.hook)
        if call.trains:
            part_gradients(members.modules, call.args)
        return outs

    def _run_one(self, call: StepCall, module: L.LightningModule, place: int = 0) -> Any:
        with call.context():
            out = getattr(module, call.hook)(*call.args, **call.kwargs)
        if call.trains:
            loss = loss_of(out)
            if loss is not None:
                scale = call.scales[place]
                (loss if isinstance(scale, float) and scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]
        return detached(out)

    def keep(self, places: Sequence[int]) -> None: ...

    def release(self) -> None: ...


class SharedBatches:
    """A batch that several steps see one after another: one that writes to it must have a copy."""

    def __init__(self) -> None:
        self._writes: bool | None = None
        self._given: list[tuple[Tensor, int]] = []
        self._first: list[Tensor] = []
        """What the first step was given a copy of."""

    def own(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._first = tensors_in(args) if self._writes is None else []
        if self._writes is None or self._writes:
            copies = {id(tensor): cloned_alike(tensor) for tensor in tensors_in(args)}  # one that is there twice, too
            args = map_tensors(args, lambda tensor: copies[id(tensor)])
        self._given = [(tensor, version(tensor)) for tensor in tensors_in(args)]
        return args

    def check(self, hook: str) -> None:
        """After a step: whether it wrote to what it was given."""
        written = any(version(tensor) != before for tensor, before in self._given)
        if self._first:  # also by `.data`, which leaves no trace
            same = (same_numbers(given, one) for (given, _), one in zip(self._given, self._first, strict=True))
            written = written or not all(same)
        if written and self._writes is False:
            raise RuntimeError(
                f"{hook} writes in place to the batch, which it did not do before and which other variants see too; "
                "write to a copy of it (`.clone()`)"
            )
        self._writes = bool(self._writes) or written


def loss_of(out: Any) -> Tensor | None:
    """The loss in what a training_step returned; refuses what Lightning refuses."""
    return ClosureResult.from_training_step_output(out, 1).closure_loss


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Of a nested tensor, how many it holds: it has no other."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def part_gradients(modules: Sequence[L.LightningModule], args: tuple[Any, ...]) -> None:
    """No gradient is memory of the batch, or of another's gradient, as a backward of one's own may leave it: clipping
    one would clip the other."""
    taken = TakenMemory(tensors_in(args))
    for module in modules:
        for parameter in module.parameters():
            if parameter.grad is not None and not taken.take(parameter.grad):
                parameter.grad = parameter.grad.clone()


def detached(out: Any) -> Any:
    if isinstance(out, Mapping | list | tuple | Tensor):
        return map_tensors(out, Tensor.detach)
    return out
