"""Room on the disk, asked for before it is used."""

import shutil
from pathlib import Path

from pl_pipe.errors import DataError
from pl_pipe.units import format_bytes

RESERVE_BYTES = 64 << 20
"""What is left free: a disk that is full to the last byte stops more than this command."""


def check_space(folder: Path, wanted_bytes: int, *, what: str) -> None:
    """Refuses what would fill the disk."""
    free = shutil.disk_usage(folder).free
    if wanted_bytes > 0 and wanted_bytes + RESERVE_BYTES > free:
        raise DataError(
            f"{what} takes {format_bytes(wanted_bytes)}, but {folder} has {format_bytes(free)} free; make room, or set "
            f"data.root to a folder on a larger disk"
        )
