"""Files that a command leaves: all of them, or none."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pl_pipe.errors import ConfigError


@contextmanager
def written_together(targets: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Gives a temporary place for each target; they are moved to their targets if the block ends well.

    The places lie beside the targets, so that moving is renaming: a reader never sees half a file.
    """
    for path in targets.values():
        if path.is_dir():
            raise ConfigError(f"{path} is a folder, where a file is to be written; name another file")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"{path.parent} is not a folder, so {path.name} cannot be written there") from error
    folder = next(iter(targets.values())).parent
    with tempfile.TemporaryDirectory(dir=folder, prefix=".pl-pipe-") as temporary:
        places = {name: Path(temporary) / path.name for name, path in targets.items()}
        yield places
        for name, path in targets.items():
            places[name].replace(path)
