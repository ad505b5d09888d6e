"""Which modules are watched, drop out, or run once a variant. names, differences -> *layers* -> VariantArray."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe.errors import ConfigError
from pl_pipe.fusion.context import Context
from pl_pipe.fusion.rules.dropout import KINDS, dropped
from pl_pipe.tensors.interception import leaf_modules

_DROPOUTS: dict[type[nn.Module], str] = {
    nn.Dropout: "dropout",
    nn.Dropout1d: "dropout1d",
    nn.Dropout2d: "dropout2d",
    nn.Dropout3d: "dropout3d",
    nn.AlphaDropout: "alpha_dropout",
    nn.FeatureAlphaDropout: "feature_alpha_dropout",
}
_COMPILED = "_orig_mod"


def apart_modules(
    template: nn.Module, fuse_except: Mapping[str, str], differing: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """The modules that run once a variant, with the reason, as those that are named; never one inside another."""
    names = dict(template.named_modules())
    apart: dict[str, str] = {}
    for pattern, why in fuse_except.items():
        found = [name for name in names if name and fnmatchcase(name, pattern)]
        if not found:
            close = get_close_matches(pattern, names, n=3) or [name for name in names if name][:5]
            raise ConfigError(
                f"fuse_except names {pattern!r}, which is no module of the model; some that are: {', '.join(close)}"
            )
        apart.update(dict.fromkeys(found, why))
    for name, module in names.items():
        attributes = differing.get(name, ())
        if attributes and name not in apart and (name or is_leaf(module)) and not _is_dropout(module, attributes):
            apart[name] = f"differs between variants: {', '.join(attributes)}"
        elif (
            isinstance(module, torch.jit.ScriptModule)
            or hasattr(module, _COMPILED)
            or module._compiled_call_impl is not None
        ):
            apart.setdefault(name, "scripted or compiled: its operations are not seen")
        elif module._backward_hooks or module._backward_pre_hooks:
            apart.setdefault(name, "its backward hooks see one variant's gradients")
    return {name: why for name, why in apart.items() if not any(_is_inside(name, other) for other in apart)}


def is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def watched_modules(template: nn.Module, apart: Mapping[str, str]) -> dict[nn.Module, str]:
    """Layers whose name the report gives; the root itself where it has no parts."""
    leaves = {template: ""} if is_leaf(template) else leaf_modules(template)
    return {
        module: name
        for module, name in leaves.items()
        if next(module.parameters(), None) is not None
        and not isinstance(module, torch.jit.ScriptModule)
        and not any(name == other or _is_inside(name, other) for other in apart)
    }


def dropouts(template: nn.Module) -> dict[nn.Module, str]:
    """Dropout layers: their probability is asked for at every call, of each variant's own."""
    return {module: name for name, module in template.named_modules() if type(module) in _DROPOUTS}


class Dropouts:
    """A dropout layer of all variants, which may differ in its probability."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        self._kind = KINDS[_DROPOUTS[type(modules[0])]]

    def __call__(self, context: Context, input: Tensor) -> Tensor:  # noqa: A002
        rates = [float(vars(module)["p"]) for module in self._modules]  # which nobody else may read
        template: Any = self._modules[0]
        if not template.training or not any(rates):
            return input
        return dropped(context, self._kind, input, rates, in_place=bool(template.inplace))


def _is_dropout(module: nn.Module, attributes: Sequence[str]) -> bool:
    return type(module) in _DROPOUTS and tuple(attributes) == ("p",)


def _is_inside(name: str, other: str) -> bool:
    return name != other and (name.startswith(f"{other}.") or (other == "" and name != ""))
