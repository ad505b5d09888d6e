"""Reading a checkpoint with care: a damaged or foreign file is refused before training starts, naming what is wrong."""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pl_pipe.errors import CheckpointError

_SHOWN = 3  # differing names to show


@dataclass(frozen=True)
class CheckpointFacts:
    """What a checkpoint says of itself."""

    path: Path
    epoch: int
    global_step: int
    shapes: dict[str, tuple[int, ...]]
    """Names and shapes of the model's parameters and buffers."""
    resumable: bool
    """Whether it holds optimizer and loop states too, not only weights."""


def read_facts(path: Path, *, trusted: bool = False) -> CheckpointFacts:
    """Reads a Lightning checkpoint's facts; tensors are mapped, not loaded. Only a `trusted` file may hold objects."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist; ckpt_path takes last, best or a file")
    try:
        # torch's files are zip archives; what is not one would be read as pickle data of unknown origin.
        if not zipfile.is_zipfile(path):
            raise EOFError("no zip archive's end")
        content = _load(path, trusted=trusted)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise unreadable(path, error) from error
    if not isinstance(content, Mapping) or not isinstance(content.get("state_dict"), Mapping):
        raise CheckpointError(
            f"checkpoint {path} has no state_dict, so Lightning did not write it; give a Lightning checkpoint"
        )
    state = content["state_dict"]
    return CheckpointFacts(
        path=path,
        epoch=int(content.get("epoch", 0)),
        global_step=int(content.get("global_step", 0)),
        shapes={name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)},
        resumable="optimizer_states" in content and "loops" in content,
    )


def unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} ({path.stat().st_size} bytes) cannot be read: it is truncated or not a checkpoint "
        f"({_first_line(error)}); use an older one, or start anew without ckpt_path"
    )


def check_fits(facts: CheckpointFacts, model: torch.nn.Module) -> None:
    """Refuses a checkpoint whose parameter names or shapes are not the model's."""
    ours = {
        name: None if is_lazy(value) else tuple(value.shape)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)  # a module's extra state may be anything
    }
    missing = [name for name in ours if name not in facts.shapes]
    foreign = [name for name in facts.shapes if name not in ours]
    resized = [
        f"{name} {list(facts.shapes[name])} instead of {list(shape)}"
        for name, shape in ours.items()
        if shape is not None and name in facts.shapes and facts.shapes[name] != shape
    ]
    found = []
    if missing:
        found.append(f"{len(missing)} missing ({_some(missing)})")
    if foreign:
        found.append(f"{len(foreign)} unknown ({_some(foreign)})")
    if resized:
        found.append(f"{len(resized)} of another shape ({_some(resized)})")
    if found:
        raise CheckpointError(
            f"checkpoint {facts.path} belongs to another model: of its parameters, {'; '.join(found)}; "
            f"choose the recipe and data it was trained with"
        )


def check_resumable(facts: CheckpointFacts) -> None:
    """Refuses to continue training from a file that holds weights only."""
    if not facts.resumable:
        raise CheckpointError(
            f"checkpoint {facts.path} holds weights only, no optimizer or loop state; training cannot continue from it"
        )


def _load(path: Path, *, trusted: bool) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if "Weights only load failed" not in str(error):
            raise
        raise CheckpointError(
            f"checkpoint {path} holds Python objects beyond tensors and plain values (hyper-parameters such as modules "
            f"or functions), and loading those can run code; if you trust the file, set trust_checkpoint=true"
        ) from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
