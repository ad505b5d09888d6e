"""Profiles kept from one run to the next, by what they are good for. model, batch, device -> *key* -> Profile.

A cache is a convenience: where its folder cannot be used or a file in it is damaged, a run measures anew and goes on.
"""

import hashlib
import inspect
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pl_pipe._version import __version__
from pl_pipe.errors import GraphError
from pl_pipe.graph import Profile, read_profile, write_profile
from pl_pipe.log import get_logger
from pl_pipe.profiling.place import device_name
from pl_pipe.tensors.trees import tensors_in

FOLDER_VARIABLE = "PL_PIPE_CACHE"

_log = get_logger(__name__)


def default_folder() -> Path:
    """`$PL_PIPE_CACHE`, or a folder in the user's home; the temporary one where there is no home."""
    given = os.environ.get(FOLDER_VARIABLE)
    try:
        return Path(given or "~/.cache/pl_pipe/profiles").expanduser()
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / "pl_pipe" / "profiles"


@dataclass(frozen=True)
class ProfileCache:
    """A folder of profiles, one file a key."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def find(self, key: str) -> Profile | None:
        """The profile of that key; None where there is none that can be read."""
        try:
            if not self.path(key).exists():
                return None
            return read_profile(self.path(key))
        except OSError:
            return None  # `store` will say that the folder cannot be used
        except GraphError as error:
            _log.warning("the cached profile cannot be used and is measured anew: %s", error)
            return None

    def store(self, key: str, profile: Profile) -> None:
        """Keeps the profile: whole or not at all, also where several runs store the same one."""
        part = self.folder / f"{key}.{os.getpid()}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                write_profile(profile, part)
                part.replace(self.path(key))
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            _log.warning(
                "the profile cannot be kept for the next run: %s; set %s to a folder that can be written",
                error,
                FOLDER_VARIABLE,
            )


def profile_key(model: nn.Module, batch: Any, *, device: torch.device, autocast_dtype: torch.dtype | None) -> str:
    """Equal for what has the same profile: the same model, shapes, device and versions, whatever the values."""
    facts = {
        "model": _model_facts(model),
        "batch": _described(batch),
        "device": device_name(device),
        "autocast": str(autocast_dtype),
        "torch": torch.__version__,
        "pl_pipe": __version__,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _model_facts(model: nn.Module) -> dict[str, Any]:
    """Everything that tells what a step computes, as far as it can be told without running it."""
    seen: dict[int, str] = {}  # a tensor under a second name is the first one again

    def state(named: Any) -> list[Any]:
        return [[name, seen.setdefault(id(tensor), name), *_spec(tensor)] for name, tensor in named]

    modules = list(model.named_modules(remove_duplicate=False))
    classes = {type(module) for _, module in modules}
    return {
        "modules": [[name, _name(type(module)), module.extra_repr(), _settings(module)] for name, module in modules],
        "parameters": state(model.named_parameters(remove_duplicate=False)),
        "buffers": state(model.named_buffers(remove_duplicate=False)),
        "training_step": _source(getattr(type(model), "training_step", None)),
        "forwards": sorted(f"{_name(kind)} {_source(kind.forward)}" for kind in classes),
    }


def _settings(module: nn.Module) -> dict[str, str]:
    """Plain public attributes (`self.depth = 3`), which a forward may act on."""
    return {
        name: repr(value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_") and name != "training"
    }


def _source(function: Callable[..., Any] | None) -> str:
    try:
        return "" if function is None else inspect.getsource(function)
    except (OSError, TypeError):  # typed in at a prompt, or built in
        return ""


def _described(tree: Any) -> Any:
    """A batch's structure and the shapes in it; of other values the types."""
    if isinstance(tree, Tensor):
        return _spec(tree)
    if isinstance(tree, Mapping):
        return {_name(type(tree)): [[str(key), _described(item)] for key, item in tree.items()]}
    if isinstance(tree, tuple | list):
        return {_name(type(tree)): [_described(item) for item in tree]}
    return {_name(type(tree)): [_spec(tensor) for tensor in tensors_in(tree)]}


def _spec(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
