"""Checkpoints that are whole or absent, on any file system."""

import zipfile
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from typing_extensions import override

from pl_pipe.runtime.checkpoint import unreadable


def local_path(path: Any) -> Path | None:
    """Of a file of this machine, also one that is written as `file:///…`; None for any other URL."""
    files, place = url_to_fs(str(path))
    return Path(place) if isinstance(files, LocalFileSystem) else None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, then renames.

    Lightning writes to the temporary folder and moves from there; on another file system that is a copy over the old
    file, and a full disk or a kill in the middle would leave neither the old checkpoint nor the new one.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        local = local_path(path)
        if local is None:  # a remote store has its own way to be atomic
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = Path(f"{local}.part")
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            part.replace(local)
        finally:
            part.unlink(missing_ok=True)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return super().load_checkpoint(path, *args, **kwargs)
        except Exception as error:
            local = local_path(path)
            if local is None or not local.is_file() or zipfile.is_zipfile(local):
                raise
            raise unreadable(local, error) from error
