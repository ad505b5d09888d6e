"""The packages that decide how a run behaves, by version."""

import platform
from importlib.metadata import PackageNotFoundError, version

from pl_pipe._version import __version__


def versions() -> dict[str, str]:
    """Read from the installed packages' own records: nothing is imported for it."""
    found = {"pl-pipe": __version__, "python": platform.python_version()}
    for name in ("torch", "torchvision", "lightning", "hydra-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
