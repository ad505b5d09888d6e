"""Puts routed forwards into a model's modules, and takes them out again."""

from collections.abc import Mapping

from torch import nn

from pl_pipe.tensors.ghosts.modules import ModulePlace, RoutedForward


def route(places: Mapping[nn.Module, ModulePlace]) -> None:
    for module, place in places.items():
        vars(module)["forward"] = RoutedForward(module, place)  # not through __setattr__, which scripted modules refuse


def unroute(module: nn.Module) -> None:
    """The forwards of a module and its parts are their own again."""
    for part in module.modules():
        routed = vars(part).get("forward")
        if isinstance(routed, RoutedForward):
            if routed.stored is None:
                del vars(part)["forward"]
            else:
                vars(part)["forward"] = routed.stored
