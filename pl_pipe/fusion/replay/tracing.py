"""The operations of a step, forward and backward, while it runs. step -> *trace* -> a graph of tensors to tensors.

The step runs once for real and its numbers count; meanwhile every operation is written down. Parameters, buffers and
the batch are known by identity, so that the graph takes them as arguments, and another variant's can be given instead:
whose step is only seen to be the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx

from pl_pipe.errors import FusionError
from pl_pipe.fusion.replay.drawing import note_shifts
from pl_pipe.fusion.replay.graph_facts import is_convolution, is_random, written_to
from pl_pipe.fusion.replay.operations import Operation, Operations
from pl_pipe.fusion.replay.refusals import refused, seeding_noted


@dataclass
class Traced:
    """A step's operations: `graph(*state, *inputs)` gives the outputs, and changes what the step changed in place."""

    graph: fx.GraphModule
    values: list[Tensor]
    """The outputs of the run that was traced."""
    is_random: bool
    """Whether it draws random numbers, on the device of its state."""
    operations: Sequence[Operation] = ()
    is_seeding: bool = False
    """Whether it sets the state of random numbers."""
    unsaid: Sequence[str] = ()
    """Operations that draw and do not say so."""

    @property
    def is_anyones(self) -> bool:
        """Whether all tensors are given: those that the step found elsewhere may be other ones for another variant."""
        return not _constants(self.graph)

    @property
    def has_convolutions(self) -> bool:
        return any(is_convolution(node) for node in self.graph.graph.nodes)

    def is_like(self, other: "Traced") -> bool:
        """Whether the graphs are the same, but for the tensors they are given."""
        if self.graph is other.graph:
            return True
        if self.graph.code != other.graph.code:
            return False
        mine, theirs = _constants(self.graph), _constants(other.graph)
        return mine.keys() == theirs.keys() and all(_equal(mine[name], theirs[name]) for name in mine)


def trace(step: Callable[[], Sequence[Tensor]], *, state: Sequence[Tensor], inputs: Sequence[Tensor]) -> Traced:
    """Runs the step, which uses `state` and `inputs`; refuses what a replay would get wrong."""
    found: list[Tensor] = []
    device = state[0].device if state else torch.device("cpu")
    operations = Operations([*state, *inputs], random_state=partial(_generator, device))

    def run(*_: Tensor) -> list[Tensor]:
        with operations:
            found.extend(step())
        operations.end(found)
        return found

    with refused(state, inputs), seeding_noted() as seeded:
        graph = make_fx(run, tracing_mode="real")(*state, *inputs)
    note_shifts(graph, operations.shifts)
    given = graph.graph.find_nodes(op="placeholder")[len(state) :]
    if not written_to(graph).isdisjoint(given):
        raise FusionError("the step writes in place to the batch (`.data`), which other variants see too")
    draws = _draws(graph) or bool(operations.unsaid)
    return Traced(graph, found, draws, operations.found, bool(seeded), operations.unsaid)


def follow(
    step: Callable[[], Sequence[Tensor]], traced: Traced, *, state: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Traced:
    """Runs another variant's step, whose operations must be those that were traced: OperationsDifferError."""
    operations = Operations([*state, *inputs], traced.operations)
    with refused(state, inputs), seeding_noted() as seeded, disable_autocast_cache(), operations:
        values = list(step())
    operations.end(values)
    return replace(traced, values=values, is_seeding=bool(seeded))


def _draws(graph: fx.GraphModule) -> bool:
    return any(is_random(node) for node in graph.graph.nodes)


def _generator(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _constants(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Tensors that the step found elsewhere: what it made itself, and a module's plain attributes."""
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    return {name: value for name in names if isinstance(value := getattr(graph, name), Tensor)}


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))
