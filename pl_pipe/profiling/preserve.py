"""Leaves a model as it was: weights, gradients, buffers, flags, plain attributes, devices and random numbers."""

import copy
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, OrderedDict, set, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class RandomState:
    """The random number generators a step may draw from, as they stood when this was made."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    @property
    def torch_state(self) -> Tensor:
        """Of the CPU's generator."""
        return self._torch

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def host_draws() -> tuple[Any, ...]:
    """Where Python's and NumPy's generators stand; equal as long as nobody draws."""
    numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), *(one.tobytes() if isinstance(one, np.ndarray) else one for one in numpy.values())


class ModelState:
    """Everything a step may change in a model, copied when this was made.

    Attributes are kept one container deep: `self.steps += 1` and `self.history.append(loss)` are undone, what happens
    inside other objects is not, but for generators of random numbers. Without `weights`, which take the most memory,
    parameters are left as they are found.
    """

    def __init__(self, model: nn.Module, *, weights: bool = True) -> None:
        self._attributes = [(module, dict(vars(module)), contents_of(module)) for module in model.modules()]
        self._training = [(module, module.training) for module in model.modules()]
        self._grads = [(parameter, parameter.grad) for parameter in model.parameters()]
        tensors = [tensor for tensor in _all_tensors(model) if weights or not isinstance(tensor, nn.Parameter)]
        self._values = [(tensor, tensor.data, host_copy(tensor)) for tensor in tensors]
        self._generators = OwnGenerators(generators_in(model.modules()))

    def restore(self) -> None:
        for module, attributes, contents in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
            for name, items in contents.items():
                refill(attributes[name], items)
        for module, training in self._training:
            if module.training != training:  # scripted modules keep it elsewhere
                module.training = training
        for parameter, _ in self._grads:
            parameter.grad = None  # a gradient must not lie on another device than its parameter, not even in passing
        for tensor, data, value in self._values:
            if tensor.device != data.device or tensor.data_ptr() != data.data_ptr():
                tensor.data = data  # it was moved: the original is untouched
            elif not torch.equal(tensor.detach(), value.to(tensor.device)):
                tensor.data.copy_(value)  # through .data, so that graphs that saved it do not take it for changed
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._generators.restore()


class OwnGenerators:
    """Generators of random numbers, as they stood when this was made."""

    def __init__(self, generators: Iterable[Any]) -> None:
        self._states = [(one, _state_of(one)) for one in generators]

    def have_drawn(self) -> bool:
        return any(_bytes_of(_state_of(one)) != _bytes_of(state) for one, state in self._states)

    def restore(self) -> None:
        for one, state in self._states:
            if isinstance(one, random.Random):
                one.setstate(state)
            elif isinstance(one, np.random.Generator):
                one.bit_generator.state = state
            else:
                one.set_state(state)


def generators_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Those among the modules' attributes, one container deep."""
    values = [value for module in modules for value in vars(module).values()]
    nested = [item for value in values if isinstance(value, list | tuple | dict) for item in _items(value)]
    return list({id(one): one for one in (*values, *nested) if isinstance(one, _GENERATORS)}.values())


def _items(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state)


@contextmanager
def kept_as_it_was(model: nn.Module) -> Iterator[ModelState]:
    """Whatever is done inside leaves no trace on the model or the random number generators."""
    random_state, state = RandomState(), ModelState(model)
    try:
        yield state
    finally:
        state.restore()
        random_state.restore()


def _all_tensors(model: nn.Module) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found[id(tensor)] = tensor
    for module in model.modules():
        for value in vars(module).values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            found.update({id(item): item for item in items if isinstance(item, Tensor)})
    # Sparse ones are not changed in place, and those without numbers cannot be.
    return [tensor for tensor in found.values() if tensor.layout is torch.strided and not tensor.is_meta]


def host_copy(tensor: Tensor) -> Tensor:
    """In the host's memory, which is less scarce than a device's."""
    return tensor.detach().to("cpu", copy=True)


def contents_of(module: nn.Module) -> dict[str, Any]:
    """Copies of the containers among a module's attributes, one deep."""
    return {name: type(value)(value) for name, value in vars(module).items() if type(value) in _CONTAINERS}


def refill(container: Any, items: Any) -> None:
    """Gives a container the items of its copy."""
    if isinstance(container, list):
        container[:] = items
    else:
        container.clear()
        container.extend(items) if isinstance(container, deque) else container.update(items)
