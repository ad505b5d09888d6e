"""All workers become one: everything that training changed is averaged. strategy -> *Reunion* -> meetings, exchange.

Parameters, running statistics of batch norm (and any other floating-point buffer) and the optimizer's state become the
mean over all workers that live; whole numbers become the furthest worker's. During training only parameters
are averaged: momentum follows a worker's own gradients, as in the published systems, and is brought together here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pl_pipe.comm.coordination import CoordinatorClient
from pl_pipe.comm.synchronizers.exchange import Averaging
from pl_pipe.comm.synchronizers.flat import FlatTensors
from pl_pipe.comm.transport import CommunicationError

_TIMES = 10  # workers may die while they are averaged; so many at a time do not


class Reunion:
    """One worker's part; all that live come to the same reunions."""

    def __init__(self, client: CoordinatorClient, averaging: Averaging) -> None:
        self._client, self._averaging = client, averaging
        self._number = 0

    def copy(self, tensors: Sequence[Tensor], *, of: int) -> None:
        """All workers' tensors, of whatever type, become those of one worker."""
        self.average(tensors, of=of)
        whole = [tensor for tensor in tensors if not _has_mean(tensor)]
        if whole:
            own = [tensor.cpu() for tensor in whole] if self._client.worker == of else None
            found = self._client.meet(own, "copy buffers")
            for tensor, given in zip(whole, found[of], strict=True):
                tensor.copy_(given)

    def average(self, tensors: Sequence[Tensor], *, of: int | None = None) -> None:
        """All workers' tensors become their mean, or those of one worker; what has no mean stays."""
        flat = FlatTensors(tensors)
        if not flat.numel:
            return
        buffer = flat.empty()
        for _ in range(_TIMES):
            members = sorted(self._client.meet(about="average"))
            shares = [1 / len(members) if of is None else float(member == of) for member in members]
            flat.read(buffer)
            # Numbers of groups are even: a message of one can not be taken for one of the other.
            lost = self._averaging.average(buffer, members, shares, 2 * self._number + 1)
            self._number += 1
            flat.write(buffer)
            if not any(self._client.meet(bool(lost), "average").values()):
                return
        raise CommunicationError(
            f"workers were lost in each of {_TIMES} attempts to average those that live; see what ends them"
        )

    def model(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self.average([*parameters.values(), *buffers.values()])
        self._take_furthest(list(buffers.values()), "compare buffers")

    def optimizer(self, optimizer: Optimizer) -> None:
        """Its state becomes the mean; a worker that has none yet takes the first one's that has. Whole numbers, in
        tensors or not, become the furthest worker's."""
        self._fill(optimizer)
        tensors = dict(_states(optimizer))
        self.average(list(tensors.values()))
        self._take_furthest(list(tensors.values()), "compare optimizers")
        for (_, name), tensor in tensors.items():
            if name == "step" and tensor.is_floating_point():
                tensor.round_()  # a count, kept as a fraction
        brought = self._client.meet([number for *_, number in _numbers(optimizer)], "compare optimizers").values()
        for place, (state, name, own) in enumerate(_numbers(optimizer)):
            values = [numbers[place] for numbers in brought]
            state[name] = max(values) if isinstance(own, int) else sum(values) / len(values)

    def _take_furthest(self, tensors: Sequence[Tensor], about: str) -> None:
        """Of what has no mean: counts, mostly."""
        whole = [tensor for tensor in tensors if not _has_mean(tensor)]
        if whole:
            found = self._client.meet([tensor.cpu() for tensor in whole], about)
            for place, tensor in enumerate(whole):
                tensor.copy_(max((found[worker][place] for worker in sorted(found)), key=lambda one: int(one.sum())))

    def _fill(self, optimizer: Optimizer) -> None:
        """All workers have states of the same layout after this, whoever dies on the way."""
        own = self._client.worker
        for _ in range(_TIMES):
            layouts = self._client.meet(_layout(optimizer), "compare optimizers")
            fullest = max(layouts, key=lambda worker: (len(layouts[worker]), -worker))
            if all(layout == layouts[fullest] for layout in layouts.values()):
                return
            given = optimizer.state_dict() if own == fullest else None
            state = self._client.meet(given, "compare optimizers").get(fullest)
            if state is not None and layouts[own] != layouts[fullest]:
                optimizer.load_state_dict(state)
        raise CommunicationError(
            f"the states of {type(optimizer).__name__} differ among the workers in names or shapes, so they cannot be "
            f"averaged; see that all ranks optimize the same parameters"
        )


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _layout(optimizer: Optimizer) -> list[tuple[Any, ...]]:
    tensors = [(number, name, tuple(tensor.shape)) for (number, name), tensor in _states(optimizer)]
    return [*tensors, *((name, type(number).__name__) for _, name, number in _numbers(optimizer))]


def _states(optimizer: Optimizer) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """Tensors of the state, in an order that is the same on all workers."""
    for place, state, name in _entries(optimizer):
        if isinstance(state[name], Tensor):
            yield (place, name), state[name]


def _numbers(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], str, int | float]]:
    """What the state has of plain numbers, and where; as some optimizers count their steps."""
    for _, state, name in _entries(optimizer):
        if isinstance(state[name], int | float) and not isinstance(state[name], bool):
            yield state, name, state[name]


def _entries(optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], str]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for name in sorted(map(str, state)):
            yield place, state, name


def digest(parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, str]:
    """What must be the same on all workers: every tensor's shape and type, by name."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in {**parameters, **buffers}.items()
    }


def difference(digests: Mapping[int, Mapping[str, str]]) -> str | None:
    """In words, the first thing that is not the same on all workers."""
    first = min(digests)
    for worker, own in sorted(digests.items()):
        for name in {**digests[first], **own}:
            here, there = digests[first].get(name, "absent"), own.get(name, "absent")
            if here != there:
                return f"{name} is {here} on rank {first} and {there} on rank {worker}"
    return None
