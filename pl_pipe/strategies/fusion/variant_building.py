"""Variants of a LightningModule: its class called again. module, choices, seeds -> *building* -> LightningModules.

A variant starts as a run of its own would: the generators are seeded, then the class is called. So its initial weights
are those of `seed_everything(seed); Model(**hyper_parameters)`.
"""

import copy
import importlib
import inspect
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor

from pl_pipe.errors import ConfigError, PlPipeError
from pl_pipe.log import get_logger
from pl_pipe.profiling.preserve import RandomState
from pl_pipe.strategies.fusion.lightning_cli import CLIS, INSTANTIATOR, built_by_cli, take_cli_optimizer
from pl_pipe.strategies.fusion.support import check_lightning
from pl_pipe.strategies.fusion.variant_choices import SEED, Choice

log = get_logger(__name__)

BATCH_SIZE = "batch_size"
Factory = Callable[..., L.LightningModule]


@dataclass
class Variant:
    """One LightningModule among those that are trained together."""

    number: int
    """As in `val_loss/variant_3`."""
    choice: Choice
    """What it was given, its seed and batch size included."""
    module: L.LightningModule
    seed: int
    follows: bool
    """Has the run's own seed, and so draws from the process's generators as a run of its own would."""
    random_state: Tensor
    """Of torch's generator, after the module was built."""
    batch_size: int | None = None
    """Where the choice asks for one."""
    is_told_batch_size: bool = False
    """The module has been built with it, and may make its own batches by it."""
    stream: list[Tensor] | None = None
    """Where its own random numbers stood after its last fit."""


def build_variants(
    module: L.LightningModule,
    choices: Sequence[Choice],
    *,
    factory: Factory | str | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Variant]:
    """All variants, one after another; the generators are then as they were."""
    make = _called_by_path(factory) if isinstance(factory, str) else factory
    if make is not None and not callable(make):
        raise ConfigError(f"factory is {make!r}, which cannot be called; give a function that builds a module")
    before, run_seed = RandomState(), _run_seed()
    variants = []
    try:
        for number, choice in enumerate(choices):
            settings = dict(choice)
            own = _taken(settings, SEED, module, make)
            batch_size = settings.get(BATCH_SIZE)
            if batch_size is not None and _whole(batch_size, number, BATCH_SIZE) < 1:
                raise ConfigError(f"variant {number} has batch_size={batch_size}; choose 1 or more")
            _taken(settings, BATCH_SIZE, module, make)
            own = own if own is not None or seeds is None else seeds[number]
            seed = run_seed if own is None else _whole(own, number)
            _seed(seed)
            built = _built(module, settings, make, number, settings_text(choice))
            if make is None:
                take_cli_optimizer(built, module)
            state = torch.get_rng_state()
            told = batch_size is not None and BATCH_SIZE in settings
            variants.append(Variant(number, choice, built, seed, seed == run_seed, state, batch_size, told))
    finally:
        before.restore()
    if make is None:
        _warn_of_unlike(module, [variant.module for variant in variants])
    return variants


def _warn_of_unlike(given: L.LightningModule, variants: Sequence[L.LightningModule]) -> None:
    """What was done to the module after its class was called, no variant has."""
    flags = [{name: one.requires_grad for name, one in module.named_parameters()} for module in (given, *variants)]
    for name, trained in flags[0].items():
        if all(own.get(name, trained) != trained for own in flags[1:]):
            log.warning(
                "%s of the given %s is %s, and of its variants, which are built anew by its class, it is not; do it in "
                "__init__ or in setup(), or give a factory that does",
                name, type(given).__name__, "trained" if trained else "frozen (requires_grad=False)",
            )  # fmt: skip
            return


def known_names(module: L.LightningModule) -> list[str]:
    return [str(name) for name in module.hparams if name not in CLIS]


def _built(
    module: L.LightningModule, settings: Choice, make: Factory | None, number: int, told: str
) -> L.LightningModule:
    if make is not None:
        try:
            built = make(**settings)
        except Exception as error:
            raise ConfigError(
                f"the factory fails for variant {number} ({told}): {described(error)}; give it arguments that it takes"
            ) from error
        check_lightning(built)
        if not isinstance(built, L.LightningModule):
            raise ConfigError(f"the factory gave a {type(built).__name__} for variant {number}, no LightningModule")
        return built
    known = known_names(module)
    unknown = [name for name in settings if name not in known]
    name = type(module).__name__
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none: call self.save_hyperparameters() in __init__"
        raise ConfigError(
            f"variant {number} sets {unknown[0]!r}, which is no saved hyper-parameter of {name}; {has}; or give a "
            "factory"
        )
    saved = {str(key): copy.deepcopy(value) for key, value in module.hparams.items()}
    arguments: dict[str, Any] = {**saved, **copy.deepcopy(settings)}
    if INSTANTIATOR in saved:
        return _checked(lambda: built_by_cli(type(module), arguments), name, number, told)
    whole = str(getattr(module, "_hparams_name", None))
    parameters = inspect.signature(type(module).__init__).parameters
    if whole in parameters and whole not in saved and parameters[whole].kind is not inspect.Parameter.VAR_KEYWORD:
        arguments = {whole: AttributeDict(arguments)}  # saved as one mapping: __init__(self, config)
    elif not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        arguments = {key: value for key, value in arguments.items() if key in parameters}
    try:
        inspect.signature(type(module)).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{name}(**its saved hyper-parameters) fails for variant {number}: {error}; save all arguments "
            "(self.save_hyperparameters()), or give a factory"
        ) from error
    return _checked(lambda: type(module)(**arguments), name, number, told)


def _checked(build: Callable[[], L.LightningModule], name: str, number: int, told: str) -> L.LightningModule:
    try:
        return build()
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be built as variant {number} ({told}): {described(error)}; choose other values"
        ) from error


def described(error: Exception) -> str:
    """A user's own error in a sentence of ours."""
    said = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else ""
    return said if isinstance(error, PlPipeError) and said else f"{type(error).__name__}: {said}".rstrip(": ")


def _taken(settings: Choice, name: str, module: L.LightningModule, make: Factory | None) -> Any:
    """A name that is the run's, unless the model knows it as its own."""
    if make is not None:
        knows = name in inspect.signature(make).parameters
    else:
        knows = name in known_names(module)
    return None if knows else settings.pop(name, None)


def _run_seed() -> int:
    """What `seed_everything` was called with, or else what torch's generator began with."""
    found = os.environ.get("PL_GLOBAL_SEED")
    return int(found) if found is not None else torch.initial_seed() % 2**32


def _whole(value: Any, number: int, name: str = SEED) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"variant {number} has {name}={value!r}; give a whole number")
    return int(value)


def _seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(f"a variant's seed is {seed}; choose a number from 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _called_by_path(path: str) -> Factory:
    """`my_package.models.build` or `my_package.models:build`."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found: Factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"factory={path} cannot be imported ({error}); name a function: my_package.build") from error
    return found


def settings_text(choice: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in choice.items()) or "as given"
