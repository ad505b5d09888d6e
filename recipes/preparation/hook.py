"""A further step that another package brings: vocabularies from texts, shards from texts.

A hook is a function, named by its path in the configuration and called as

    hook(files, folder, **settings) -> files that it made

with the texts to read and the folder to write to. What it returns must lie in that folder. One with a parameter called
`report` gets the preparation's, to tell how far it is.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pl_pipe.errors import ConfigError

from .report import Report


@dataclass(frozen=True)
class Hook:
    """A function by its path, and settings for it."""

    setting: str
    """Where the configuration names it, such as `prepare.vocabulary`."""
    path: str | None
    settings: Mapping[str, Any]

    def find(self) -> Callable[..., Sequence[Path]] | None:
        """The function; None where the step is left out."""
        if self.path is None:
            return None
        module, _, function = self.path.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"{self.setting}.hook={self.path} cannot be imported ({error}); name a function that is installed, or "
                f"set {self.setting}.hook=null to prepare the texts alone"
            ) from error
        if not callable(found):
            raise ConfigError(f"{self.setting}.hook={self.path} is no function; name one, or set it to null")
        checked: Callable[..., Sequence[Path]] = found
        return checked

    def run(self, files: Sequence[Path], folder: Path, report: Report) -> list[Path]:
        """What the step made."""
        step = self.find()
        if step is None:
            return []
        told = {"report": report} if "report" in inspect.signature(step).parameters else {}
        made = [Path(path).absolute() for path in step(list(files), folder, **told, **self.settings)]
        strange = [path for path in made if not path.exists() or not path.is_relative_to(folder)]
        if strange:
            raise ConfigError(
                f"{self.setting}.hook={self.path} says that it made {strange[0]}, which is not in {folder}"
            )
        return made
