"""Libraries of the `text` extra, imported when they are used: the other recipes do without them."""

from importlib import import_module
from typing import Any

from pl_pipe.errors import ConfigError


def needed(library: str) -> Any:
    """The library, or an error that says how to get it."""
    try:
        return import_module(library)
    except ImportError as error:
        raise ConfigError(
            f"{library} is not installed ({error}), and this recipe or data set needs it; "
            "install it by: pip install 'pl-pipe[text]' (in a clone: pip install -e '.[text]')"
        ) from error
