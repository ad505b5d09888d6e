"""What was measured, as lines of a CSV file that grows by one at a time: cells -> *rows* -> tables and pictures.

A program that is stopped has kept what it measured, and the next call leaves out what is there. Rows tell the run they
belong to, their time and their GPU, since only what was measured side by side is compared.
"""

import collections
import csv
import datetime
import fcntl
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RUN_COLUMNS = ("run", "date", "gpu")
NO_GPU = "none"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def run_name(given: str | None, *, small: bool) -> str:
    """By default the day's. Tiny models are a run of their own, whose rows count for no other."""
    name = given or now()[:10]
    return f"{name}, small" if small else name


def gpu_name() -> str:
    """The first card's, asked for without taking any of its memory."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return NO_GPU
    return lines[0].strip() if lines else NO_GPU


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """Before hours are spent on rows that do not fit the file."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open(newline="") as file:
        found = next(csv.reader(file))
    if found != list(columns):
        raise SystemExit(f"{path} has other columns ({', '.join(found)}); move it away, or give another --out")


def append(path: Path, columns: Sequence[str], *rows: Mapping[str, Any]) -> None:
    """Written at once, all or none, also while another program adds to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if not path.stat().st_size:
            writer.writeheader()
        writer.writerows(rows)


Key = tuple[str, ...]


def key(row: Mapping[str, Any], names: Sequence[str]) -> Key:
    """Numbers count as their text, which is what a file has of them."""
    return tuple(str(row[name]) for name in names)


def done(
    rows: Iterable[Mapping[str, str]], names: Sequence[str], *, run: str, gpu: str, failed_too: bool
) -> collections.Counter[Key]:
    """How often each was measured in this run on this card; `failed_too` for what ended in an error as well."""
    return collections.Counter(
        key(row, names)
        for row in rows
        if (row.get("run"), row.get("gpu")) == (run, gpu) and (row["samples_s"] or failed_too)
    )
