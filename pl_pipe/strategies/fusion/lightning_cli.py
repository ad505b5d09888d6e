"""Variants of a model that LightningCLI has built: from the configuration that it saved. hyper-parameters -> module."""

import copy
from collections.abc import Mapping
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

import lightning as L
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context

from pl_pipe.errors import ConfigError

INSTANTIATOR, _CLASS = "_instantiator", "_class_path"
CLIS = (INSTANTIATOR, _CLASS)
"""What LightningCLI saves besides hyper-parameters."""
_CONFIGURE = "configure_optimizers"


def built_by_cli(kind: type[L.LightningModule], saved: Mapping[str, Any]) -> L.LightningModule:
    """As LightningCLI builds it: classes among the hyper-parameters (`class_path`, `init_args`) are built first."""
    from jsonargparse import ArgumentParser  # LightningCLI has it, others need not

    own = {name: value for name, value in saved.items() if name != INSTANTIATOR}

    def build(found: type[L.LightningModule], *args: Any, **kwargs: Any) -> L.LightningModule:
        with _given_hyperparameters_context(hparams=own, instantiator=saved[INSTANTIATOR]):
            return found(*args, **kwargs)

    parser = ArgumentParser(exit_on_error=False)
    parser.add_instantiator(build, kind, subclasses=_CLASS in own)
    if _CLASS in own:
        parser.add_subclass_arguments(kind, "module", fail_untyped=False)
        arguments = {name: value for name, value in own.items() if name != _CLASS}
        found = parser.parse_object({"module": {"class_path": own[_CLASS], "dict_kwargs": arguments}})
    else:
        parser.add_class_arguments(kind, "module", fail_untyped=False)
        found = parser.parse_object({"module": own})
    module: L.LightningModule = parser.instantiate_classes(found).module
    return module


def take_cli_optimizer(module: L.LightningModule, given: L.LightningModule) -> None:
    """LightningCLI's `--optimizer` and `--lr_scheduler` are objects made for the model that was given."""
    method = vars(given).get(_CONFIGURE)
    made = getattr(method, "__func__", None)
    if not isinstance(made, partial) or "optimizer" not in made.keywords:
        return
    optimizer, parameters = made.keywords["optimizer"], list(given.parameters())
    groups = optimizer.param_groups
    if len(groups) != 1 or list(map(id, groups[0]["params"])) != list(map(id, parameters)):
        raise ConfigError(
            f"the {type(optimizer).__name__} of LightningCLI is not of all the model's parameters in one group, and "
            "cannot be made for each variant; write configure_optimizers in the model"
        )
    own = copy.deepcopy(made.keywords, {id(parameter): parameter for parameter in parameters})
    own["optimizer"].param_groups[0]["params"] = list(module.parameters())
    vars(module)[_CONFIGURE] = MethodType(update_wrapper(partial(made.func, **own), made), module)
