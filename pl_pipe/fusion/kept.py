"""Tensors that modules keep as plain attributes from one forward to the next: a hidden state, a cache.

Parameters and buffers have their places; these are found after a forward, handed to every variant's module, and put
together again for the next one.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from pl_pipe.errors import FusionError
from pl_pipe.fusion.comparing import alike, has_tensor
from pl_pipe.fusion.values import holds_array, split, stacked

_OF_TORCH = "torch.nn.modules."
_PLACES = ("_parameters", "_buffers", "_modules", "_flat_weights")


class KeptTensors:
    def __init__(self, variants: Sequence[nn.Module], apart: Iterable[nn.Module]) -> None:
        """Modules under `apart` run once a variant, and keep what they keep by themselves."""
        by_themselves = {part for module in apart for part in module.modules()}
        self._modules = [
            list(of_all)
            for of_all in zip(*(variant.modules() for variant in variants), strict=True)
            if of_all[0] not in by_themselves
            and (not type(of_all[0]).__module__.startswith(_OF_TORCH) or of_all[0]._forward_pre_hooks)
        ]
        self._known: set[tuple[int, str]] = set()
        """Left by a fused forward."""
        self._differing = {
            (place, attribute)
            for place, (first, *others) in enumerate(self._modules)
            for attribute, value in vars(first).items()
            if attribute not in _PLACES
            and has_tensor(value)
            and any(not alike(value, vars(other).get(attribute)) for other in others)
        }

    def show(self) -> None:
        for place, attribute in self._known | self._differing:
            of_all = self._modules[place]
            values = [vars(module).get(attribute) for module in of_all]
            if not all(has_tensor(value) for value in values):
                continue
            try:
                vars(of_all[0])[attribute] = stacked(values)
            except FusionError:
                if (place, attribute) in self._known:
                    raise
                # a metric's, most likely: nothing that a forward reads

    def hide(self) -> None:
        for place, of_all in enumerate(self._modules):
            kept = [name for name, value in vars(of_all[0]).items() if name not in _PLACES and holds_array(value)]
            for attribute in kept:
                if (place, attribute) not in self._differing:
                    self._known.add((place, attribute))
                for module, part in zip(of_all, split(vars(of_all[0])[attribute], len(of_all)), strict=True):
                    vars(module)[attribute] = part
