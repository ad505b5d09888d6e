"""What the benchmarks of adaptive training share: commands in a lab, metrics by step, tables, pictures."""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "pipedream"))

from failures import Failures
from rows import this_machine

from pl_pipe.cluster import LabConfig
from pl_pipe.lab import Lab
from pl_pipe.lab.interruption import ending_by_exception
from pl_pipe.lab.rehearsal import rehearse
from pl_pipe.report.charts import figure, stage_colour

__all__ = ["Failures"]

Row = dict[str, Any]
During = Callable[[Lab, Path, threading.Event], None]
DONE = "done.json"
RUN = ("setting", "run")
"""Columns that tell runs apart in a file of rows."""


class RunError(RuntimeError):
    """A run that did not end well, or was not what it should have been."""


def trained_in(
    lab: LabConfig, command: Sequence[str], folder: Path, during: During | None = None, *, happens: str = ""
) -> Path:
    """Runs `pl-pipe COMMAND` in a lab; gives the run's directory.

    Args:
        during: called as `during(lab, run, over)` on a thread; what it raises counts as the run's failure, since the
            run was not what it should have been. `over` is set when the run has ended.
        happens: what that is, in words: a run with other traffic is another run.
    """
    run = folder.resolve() / "run"
    full = ["-m", "pl_pipe", *command, f"hydra.run.dir={run}"]
    done = [*full, str(lab), happens]
    if is_done(folder, done):
        return run
    over, errors = threading.Event(), list[Exception]()

    def help_along(up: Lab) -> None:
        try:
            if during is not None:
                during(up, run, over)
        except Exception as error:
            errors.append(error)

    with ending_by_exception(), Lab(lab) as up:
        helper = threading.Thread(target=help_along, args=(up,), daemon=True)
        helper.start()
        try:
            code = rehearse(up, full, folder=folder / "hosts", say=lambda line: print(line, flush=True))
        finally:
            over.set()
            helper.join(60.0)
    if code:
        raise RunError(f"the run ended with exit code {code}; see {folder}")
    if errors:
        raise RunError(f"what should have happened during the run did not: {errors[0]}") from errors[0]
    mark_done(folder, done)
    return run


def trained(command: Sequence[str], folder: Path, **environment: str) -> Path:
    """`pl-pipe COMMAND` on this machine; gives the run's directory."""
    run = folder.resolve() / "run"
    full = [*command, *([f"hydra.run.dir={run}"] if command[:1] == ["fit"] else [])]
    if is_done(folder, full):
        return run
    folder.mkdir(parents=True, exist_ok=True)
    with ending_by_exception():
        process = subprocess.Popen([sys.executable, "-m", "pl_pipe", *full], env={**os.environ, **environment})
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        raise RunError(f"the run ended with exit code {code}; see {folder}")
    mark_done(folder, full)
    return run


def is_done(folder: Path, command: Sequence[str]) -> bool:
    """Whether the same command ended well before; else what an earlier one has left goes."""
    done = folder / DONE
    if done.exists() and json.loads(done.read_text()) == list(command):
        print(f"{folder}: done before; remove it to measure anew", flush=True)
        return True
    shutil.rmtree(folder, ignore_errors=True)
    return False


def mark_done(folder: Path, command: Sequence[str]) -> None:
    (folder / DONE).write_text(json.dumps(list(command)))


def steps(run: Path) -> list[Row]:
    """Rows of a run's metrics with a step time, earlier parts of a run that was started anew included."""
    found: list[Row] = []
    for file in [*sorted(run.glob("metrics_*.csv")), run / "metrics.csv"]:
        if file.exists():
            with file.open() as opened:
                found += [row for row in csv.DictReader(opened) if row.get("step_s")]
    return [{"step": int(row["step"]), **{k: float(v) for k, v in row.items() if v and k != "step"}} for row in found]


def last_step(run: Path) -> int:
    """Of those that a run has written so far; -1 before the first. A line may be half written."""
    try:
        return max((row["step"] for row in steps(run)), default=-1)
    except (TypeError, ValueError):
        return -1


def wait_for_step(run: Path, step: int, over: threading.Event, *, poll_s: float = 0.1) -> bool:
    """Until the run has made it; False if the run ended before."""
    while last_step(run) < step:
        if over.wait(poll_s):
            return False
    return True


def setting_of(options: argparse.Namespace, *names: str) -> str:
    """What runs must have in common to be compared, this machine included: a column of their rows."""
    return "; ".join([*(f"{name}={_told(getattr(options, name))}" for name in names), this_machine()])


def _told(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def keep_rows(path: Path, rows: Sequence[Row], *, by: Sequence[str] = RUN) -> list[Row]:
    """Puts rows into a file in place of those of the same runs; those of other runs stay. Gives all of them."""
    new = {tuple(str(row[name]) for name in by) for row in rows}
    kept = [row for row in read_rows(path) if tuple(str(row.get(name, "")) for name in by) not in new]
    if rows:
        write_rows(path, [*kept, *rows])
    return read_rows(path)


def of_setting(rows: Sequence[Row], setting: str) -> dict[str, list[Row]]:
    """By run, in the order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("setting") == setting:
            found.setdefault(str(row["run"]), []).append(row)
    return found


def read_rows(path: Path) -> list[Row]:
    """Numbers as numbers."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """All at once or not at all: a call that is stopped leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    part.replace(path)
    print(path)


def draw_lines(
    path: Path, lines: dict[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str,
    marks: dict[float, str] | None = None,
) -> None:  # fmt: skip
    with figure(path, width=9, height=4) as drawn:
        axes = drawn.add_subplot()
        for place, (name, (across, up)) in enumerate(lines.items()):
            axes.plot(across, up, label=name, color=stage_colour(place), linewidth=1.1)
        for where, name in (marks or {}).items():
            axes.axvline(where, color="#888888", linewidth=0.8, linestyle="--")
            axes.annotate(
                name, (where, 0.02), xycoords=("data", "axes fraction"), xytext=(3, 0), textcoords="offset points",
                fontsize=7, rotation=90, va="bottom",
            )  # fmt: skip
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    print(path)
