"""Takes back what a step has done to the variants, where it turns out in its middle that it cannot be fused.

The batch, buffers, random numbers, metrics, the modules' own attributes, and gradients of earlier batches; where there
are none of these, gradients are the strategy's to clear.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from pl_pipe.errors import FusionError
from pl_pipe.fusion import VariantArray
from pl_pipe.profiling.preserve import (
    OwnGenerators,
    RandomState,
    contents_of,
    generators_in,
    host_copy,
    host_draws,
    refill,
)
from pl_pipe.strategies.fusion.step_formulation import Members
from pl_pipe.tensors.kept_tensor import KeptTensor
from pl_pipe.tensors.plain_state import PlainState, is_atom
from pl_pipe.tensors.trees import tensors_in

_LIGHTNINGS = frozenset((*vars(L.LightningModule()), "log", "optimizers", "lr_schedulers"))
"""Attributes that no step collects in; they are put back as they are."""
Reads = set[tuple[int, str]]
"""Which of a variant's parts, and the name of its attribute."""


class StepUndo:
    """The state before a step; calling it goes back there."""

    def __init__(
        self,
        members: Members,
        array: VariantArray[L.LightningModule] | None,
        *,
        args: tuple[Any, ...] = (),
        metrics: Sequence[Metric | MetricCollection] = (),
        parts: "Sequence[UsersParts] | None" = None,
        weights: bool = False,
        gradients: bool = False,
    ) -> None:
        """`args` are what the step is given, the batch among them; of `metrics`, those that it may call; `parts` are
        the members', where they are known. With `weights`, which take time and the host's memory, what a step writes to
        its parameters is taken back too; with `gradients`, what it adds to those of earlier batches."""
        self.batch = KeptBatch(args)
        self._attributes = [(module, dict(vars(module)), contents_of(module)) for module in members.modules]
        parts = users_parts(members) if parts is None else parts
        self._plain = [one.state() for one in parts]
        self._put_back_buffers = array.buffers_kept() if array is not None else _buffers_kept(members)
        self._streams, self._states = members.streams, members.streams.states
        self._random = RandomState()
        self._generators = [OwnGenerators(one.generators) for one in parts]
        own = [parameter for module in members.modules for parameter in module.parameters()] if weights else []
        self._weights = [(parameter, host_copy(parameter)) for parameter in own]
        self._gradients = [
            (one, _copy(one.grad)) for module in members.modules for one in module.parameters() if gradients
        ]
        self._metrics = [(part, _copies(part)) for part in metrics]

    def __call__(self) -> None:
        self.batch.put_back()
        self._put_back_buffers()
        self._streams.states = self._states
        self._random.restore()
        for generators in self._generators:
            generators.restore()
        for parameter, values in self._weights:
            if not torch.equal(parameter.detach().cpu(), values):
                parameter.data.copy_(values)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for metric, state in self._metrics:
            vars(metric).clear()
            vars(metric).update(state)
        for module, attributes, contents in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
            refill(contents)
        for plain in self._plain:
            plain.restore()

    def refuse_draws(self, hook: str) -> None:
        """Whoever draws in a fused step does so in a variant's turn, after which the generator is as it was."""
        if not torch.equal(torch.get_rng_state(), self._random.torch_state):
            raise FusionError(f"{hook} draws random numbers by an operation that is not known to draw any")

    def refuse_own_draws(self, hook: str) -> None:
        """Each variant has such a generator, and one module's Python would draw from its own alone."""
        if any(generators.have_drawn() for generators in self._generators):
            raise FusionError(f"{hook} draws from a generator that is an attribute of the module")

    def called(self) -> list[Metric | MetricCollection]:
        """The metrics that the step has called, which are those to keep before the next."""
        return [part for part, state in self._metrics if _count(vars(part)) != _count(state)]


@contextmanager
def no_host_draws() -> Iterator[None]:
    """Around a backward of all variants, whose hooks are called for one after another."""
    before = host_draws()
    yield
    if host_draws() != before:
        raise FusionError("a hook draws from Python's or NumPy's random numbers, which are each variant's own")


class UsersParts:
    """The modules of one variant whose Python may keep something: not torch's, and not metrics, which have a copy."""

    def __init__(self, module: nn.Module) -> None:
        self._registered = {id(part): part for part in module.modules()}
        self._parts = [
            part
            for part in module.modules()
            if not type(part).__module__.startswith("torch.nn.modules.") and not isinstance(part, Metric)
        ]
        self.generators = generators_in(self._parts)
        """Of random numbers."""

    def state(self) -> PlainState:
        return PlainState(self._parts, _LIGHTNINGS, self._registered)

    def state_of(self, reads: Reads) -> PlainState:
        """Of containers, objects and tensors that were read, hyper-parameters among them."""
        only: dict[int, list[str]] = {}
        for place, name in sorted(reads):
            part = self._parts[place]
            value = vars(part).get(name)
            is_settings = name not in _LIGHTNINGS or name == "_hparams"
            if is_settings and not is_atom(value) and not isinstance(value, nn.Module):
                only.setdefault(id(part), []).append(name)
        return PlainState([self._registered[key] for key in only], registered=self._registered, only=only)

    def iterators(self) -> list[tuple[nn.Module, str]]:
        """Attributes that go on from step to step: what they have given cannot be taken back."""
        return [
            (part, name)
            for part in self._parts
            for name, value in vars(part).items()
            if isinstance(value, Iterator) and name not in _LIGHTNINGS
        ]

    def refuse_iterators(self) -> None:
        """Each variant has its own, of which a step that runs once for many would ask one, and a replay none."""
        for _, name in self.iterators():
            raise FusionError(
                f"the step may take what comes next from {name!r}, which only Python can do for each variant"
            )

    @contextmanager
    def reads_noted(self) -> Iterator[Reads]:
        """Within the block names of attributes that are read are put into what is given."""
        found: Reads = set()
        plain = [type(part) for part in self._parts]
        for place, part in enumerate(self._parts):
            if not isinstance(part, torch.jit.ScriptModule):
                part.__class__ = _noting(type(part), place, found)
        try:
            yield found
        finally:
            for part, kind in zip(self._parts, plain, strict=True):
                part.__class__ = kind


def _noting(kind: type[nn.Module], place: int, found: Reads) -> type[nn.Module]:
    def noted(module: nn.Module, name: str) -> Any:
        found.add((place, name))
        return kind.__getattribute__(module, name)

    return type(kind.__name__, (kind,), {"__getattribute__": noted, "__module__": kind.__module__})


def users_parts(members: Members) -> list[UsersParts]:
    return [UsersParts(module) for module in members.modules]


class KeptBatch:
    """What a step is given, as it was before. Whoever computes the step after a failure must not see its writes."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._kept = [KeptTensor(tensor) for tensor in tensors_in(args)]

    def refuse_writes(self, hook: str, *, numbers: bool) -> None:
        """Where several steps are given the same."""
        if any(kept.is_written(numbers=numbers) for kept in self._kept):
            raise FusionError(f"{hook} writes in place to the batch, which the other variants see too")

    def put_back(self) -> None:
        for kept in self._kept:
            if kept.is_written():
                kept.put_back()


def _buffers_kept(members: Members) -> Callable[[], None]:
    kept = [(buffer, buffer.clone()) for module in members.modules for buffer in module.buffers()]

    def put_back() -> None:
        for buffer, values in kept:
            buffer.data.copy_(values)

    return put_back


def all_metrics(members: Members) -> list[Metric | MetricCollection]:
    return [part for one in members.modules for part in one.modules() if isinstance(part, Metric | MetricCollection)]


def _count(state: dict[str, Any]) -> Any:
    """Of updates; a collection has none of its own, and is kept each time."""
    return state.get("_update_count", object())


def _copies(part: Any) -> dict[str, Any]:
    return {name: _copy(value) for name, value in vars(part).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return list(value) if isinstance(value, list) else value
