"""Where what was made of a data set is kept for the next run."""

import os
from pathlib import Path


def cache_folder(part: str) -> Path:
    """The folder `part` in `$PL_PIPE_CACHE`, or in the user's home."""
    return Path(os.environ.get("PL_PIPE_CACHE") or "~/.cache/pl_pipe").expanduser() / part
