"""Keeps a stage's own parameters and buffers, and puts all others onto the meta device. Ownership -> *placement*.

An optimizer made afterwards sees every parameter in its usual order; those of other stages hold no memory, get no
gradients and have no state.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from pl_pipe.errors import StageError
from pl_pipe.stages.ownership import Ownership
from pl_pipe.tensors.ghosts import settle, unsettle


def place(model: nn.Module, ownership: Ownership, stage: int) -> Mapping[Tensor, Tensor]:
    """Makes `model` what a rank of `stage` keeps of it; tied tensors stay tied.

    Returns what has taken the place of which tensor, as long as somebody has that.
    """
    twins: dict[Tensor, Tensor] = {}
    for module, name, tensor, full_name in list(_entries(model)):
        home = ownership.homes.get(full_name)
        if home is None:
            continue
        if is_lazy(tensor):
            raise StageError(f"{full_name} of a lazy module has no shape yet; run one batch through the model first")
        if tensor not in twins:
            twins[tensor] = settle(tensor if home == stage else _on_meta(tensor), home)
            settle(tensor, home)  # whoever kept it elsewhere must not take it for a tensor of the batch
        if twins[tensor] is not tensor:
            setattr(module, name, twins[tensor])  # not into the store: recurrent modules keep a second list
    exchanged: Any = WeakTensorKeyDictionary()
    exchanged.update({tensor: twin for tensor, twin in twins.items() if twin is not tensor})
    return exchanged  # type: ignore[no-any-return]


def restore(model: nn.Module, values: Mapping[str, Tensor], *, device: torch.device | str = "cpu") -> None:
    """Gives the parameters and buffers on the meta device their `values`, and makes the model an ordinary one."""
    first: dict[Tensor, str] = {}
    for _, _, tensor, full_name in _entries(model):
        first.setdefault(tensor, full_name)  # tied tensors have one value
    missing = [full_name for tensor, full_name in first.items() if tensor.is_meta and full_name not in values]
    if missing:
        raise StageError(f"no value for {missing[0]} ({len(missing)} are missing); gather all stages' state first")
    full: dict[Tensor, Tensor] = {}
    for module, name, tensor, full_name in list(_entries(model)):
        if tensor.is_meta and tensor not in full:
            value = values[full_name].detach().to(device=device, dtype=tensor.dtype).clone()
            if tuple(value.shape) != tuple(tensor.shape):
                raise StageError(f"{full_name} has shape {tuple(tensor.shape)}, its value {tuple(value.shape)}")
            full[tensor] = _marked_as(tensor, value) if isinstance(tensor, nn.Parameter) else value
        if tensor.is_meta:
            setattr(module, name, full[tensor])
        else:
            unsettle(tensor)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return _marked_as(tensor, empty) if isinstance(tensor, nn.Parameter) else empty


def _marked_as(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter, with the marks that users put on such, for their optimizers."""
    new = nn.Parameter(tensor, parameter.requires_grad)
    for name, value in vars(parameter).items():
        if not name.startswith("_pl_pipe"):
            setattr(new, name, value)
    return new


def _entries(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor, str]]:
    """Module, attribute, tensor and full name of all state, once for each attribute."""
    for prefix, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    yield module, name, tensor, f"{prefix}.{name}" if prefix else name
