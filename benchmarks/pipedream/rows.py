"""Measurements as rows of a CSV file, added as they come: benchmarks -> *rows* -> tables."""

import csv
import datetime
import fcntl
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

PAYLOAD = 0.955
"""Of a link's rate: the rest is headers (benchmarks/lab/rates.py)."""

Row = TypeVar("Row")


def today() -> str:
    return datetime.date.today().isoformat()


def this_machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release().split('-')[0]}"


def read(kind: type[Row], path: Path) -> list[Row]:
    """The rows so far. Of an older file, columns that are no more are left out, and new ones have their defaults."""
    if not path.exists():
        return []
    with path.open() as file:
        return [
            kind(**{field.name: _value(field, line.get(field.name)) for field in fields(kind)})  # type: ignore[arg-type]
            for line in csv.DictReader(file)
        ]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else changes the file within the block: copies of a benchmark may run side by side.

    The lock is its folder's, which stands when the file is replaced, and leaves nothing behind. It must not be taken
    within the block again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def append(path: Path, row: Any) -> None:
    """Adds a row; a file with other columns is written anew."""
    with locked(path):
        write(path, [*read(type(row), path), row])


def put(path: Path, row: Any) -> None:
    """Adds a row in the place of those with the same `key`."""
    with locked(path):
        write(path, [*(known for known in read(type(row), path) if known.key != row.key), row])


def write(path: Path, rows: Sequence[Any]) -> None:
    """All rows, of one kind; a file that is there is replaced at once or not at all. Who has read it holds its lock."""
    columns = [field.name for field in fields(rows[0])]
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(asdict(each) for each in rows)
    part.replace(path)


def _value(field: "Field[Any]", text: str | None) -> Any:
    if text is not None:
        return field.type(text)  # type: ignore[operator]
    if field.default is MISSING:
        raise SystemExit(f"a row has no column {field.name}; measure it anew")
    return field.default
