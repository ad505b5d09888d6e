"""Puts other tensors in the place of parameters for the time of a step. weight versions -> *swap* -> Pipe.

`torch.func.functional_call` does the same for any tensors, walks the whole model for it each time, and leaves out the
list of weights that recurrent modules keep besides. Here the places are looked up once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from pl_pipe.errors import StageError
from pl_pipe.tensors.places import put_parameter


class ParameterSwap:
    """The places of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        names: dict[nn.Parameter, str] = {}
        for prefix, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
                self._places.setdefault(name, []).append((module, attribute))

    @contextmanager
    def using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """The named parameters are these tensors, under all of their names, until the block ends."""
        before: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for name, tensor in tensors.items():
                if name not in self._places:
                    raise StageError(f"a version of {name} is given, which is no parameter of the model")
                for module, attribute in self._places[name]:
                    before.append((module, attribute, module._parameters[attribute]))  # type: ignore[arg-type]
                    put_parameter(module, attribute, tensor)
            yield
        finally:
            for module, attribute, tensor in reversed(before):
                put_parameter(module, attribute, tensor)
