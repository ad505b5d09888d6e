"""Leaves a model as it was: weights, gradients, buffers, flags, plain attributes, devices and random numbers."""

import copy
import pickle
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, OrderedDict, defaultdict, set, deque)
_DEPTH = 3  # containers in containers; a data set that a module keeps is not looked through
_LONG = 1000
_STORES = frozenset(vars(nn.Module()))
"""Attributes of every module: weights, parts and hooks."""
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

    def is_current(self) -> bool:
        """Nobody has drawn since, on the host."""
        name, keys, *place = np.random.get_state()
        kept_name, kept_keys, *kept_place = self._numpy
        return bool(
            torch.equal(self._torch, torch.get_rng_state())
            and self._python == random.getstate()
            and (name, place) == (kept_name, kept_place)
            and np.array_equal(keys, kept_keys)
        )

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

    Attributes are kept with the containers in them: `self.steps += 1` and `self.outputs[0].append(loss)` are undone,
    what happens inside other objects is not, but for generators of random numbers. Without `weights`, which take the
    most memory, parameters are left as they are found.
    """

    def __init__(self, model: nn.Module, *, weights: bool = True) -> None:
        self._attributes = [(module, dict(vars(module)), contents_of(module)) for module in model.modules()]
        self._training = [(module, module.training) for module in model.modules()]
        self._grads = [(parameter, parameter.grad) for parameter in model.parameters()]
        tensors = [tensor for tensor in _all_tensors(model) if weights or not isinstance(tensor, nn.Parameter)]
        self._values = [(tensor, tensor.data, host_copy(tensor)) for tensor in tensors]
        self._generators = OwnGenerators(generators_in(model.modules()))

    def restore_attributes(self, *, new_ones_go: bool = False) -> None:
        """What has been added stays, unless `new_ones_go`: hooks, and the mark that they are there."""
        for module, attributes, contents in self._attributes:
            if new_ones_go:
                vars(module).clear()
            vars(module).update(attributes)
            of_stores = () if new_ones_go else [id(attributes.get(name)) for name in _STORES]
            refill([(held, items) for held, items in contents if id(held) not in of_stores])

    def restore(self) -> None:
        self.restore_attributes(new_ones_go=True)
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


Contents = list[tuple[Any, Any]]
"""Containers, and what is in each."""


def contents_of(module: nn.Module, *, stores: bool = True, only: str | None = None) -> Contents:
    """Of the containers among a module's attributes, and of those within them; `stores` are its weights and hooks."""
    found: Contents = []
    for name, value in vars(module).items():
        if (stores or name not in _STORES) and only in (None, name):
            _note_contents(value, found, 1 if name in _STORES else _DEPTH)
    return found


def _note_contents(value: Any, found: Contents, depth: int) -> None:
    if type(value) not in _CONTAINERS:
        return
    items = dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)
    found.append((value, items))
    if depth > 1 and len(items) <= _LONG:
        for item in _items(items):
            _note_contents(item, found, depth - 1)


def refill(contents: Contents) -> None:
    """Gives the containers what was in them."""
    for container, items in contents:
        if isinstance(container, list):
            container[:] = items
        else:
            container.clear()
            container.extend(items) if isinstance(container, deque) else container.update(items)
