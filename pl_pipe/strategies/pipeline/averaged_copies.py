"""Copies of the model that callbacks average, divided as the model is. WeightAveraging, SWA -> *copies* -> stages.

Each is a deep copy of the whole module, made in the callback's `setup`. Divided alike, its parameters stand at the same
places as the module's on every rank, those of other stages without numbers, and the callback's loops go on as they are.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from pl_pipe.runtime.gathering import StateOwners
from pl_pipe.strategies.pipeline.divided_model import DividedModel
from pl_pipe.tensors.ghosts import outside_steps


def divide_averages(trainer: L.Trainer, divided: DividedModel, stack: ExitStack) -> None:
    """Until the stack is closed; `DividedModel.reunite` makes them whole again."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            continue
        outer: Any = callback._average_model
        if outer is None:
            continue
        copy = outer.module if isinstance(callback, WeightAveraging) else outer
        owners = divided.divide_copy(copy)
        vars(outer)["state_dict"] = partial(_whole_state, outer, copy, owners)
        stack.callback(vars(outer).pop, "state_dict", None)
        vars(copy)["to"] = partial(_own_moved, copy)
        stack.callback(vars(copy).pop, "to", None)


def _whole_state(outer: nn.Module, copy: nn.Module, owners: StateOwners) -> dict[str, Any]:
    """As it is saved: whole on rank 0."""
    gathering = vars(outer).pop("state_dict")
    try:
        with outside_steps():
            state = owners.on_first_rank()
        if copy is outer:
            return state
        return {**outer.state_dict(), **{f"module.{name}": value for name, value in state.items()}}
    finally:
        vars(outer)["state_dict"] = gathering


def _own_moved(copy: nn.Module, device: torch.device | str) -> nn.Module:
    copy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    return copy
