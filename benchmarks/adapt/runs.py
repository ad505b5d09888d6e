"""What the benchmarks of adaptive training share: commands in a lab, metrics by step, tables, pictures."""

import csv
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pl_pipe.cluster import LabConfig
from pl_pipe.lab import Lab
from pl_pipe.lab.interruption import ending_by_exception
from pl_pipe.lab.rehearsal import rehearse
from pl_pipe.report.charts import figure, stage_colour

Row = dict[str, Any]
DONE = "done.json"


def trained_in(lab: LabConfig, command: Sequence[str], folder: Path, during: Callable[[Lab, Path], None]) -> Path:
    """Runs `pl-pipe COMMAND` in a lab, with `during(lab, run)` on a thread; gives the run's directory."""
    run = folder.resolve() / "run"
    full = ["-m", "pl_pipe", *command, f"hydra.run.dir={run}"]
    if is_done(folder, full):
        return run
    with ending_by_exception(), Lab(lab) as up:
        helper = threading.Thread(target=during, args=(up, run), daemon=True)
        helper.start()
        code = rehearse(up, full, folder=folder / "hosts", say=lambda line: print(line, flush=True))
    if code:
        sys.exit(f"the run ended with exit code {code}; see {folder}")
    mark_done(folder, full)
    return run


def trained(command: Sequence[str], folder: Path) -> Path:
    """`pl-pipe COMMAND` on this machine; gives the run's directory."""
    run = folder.resolve() / "run"
    full = [*command, *([f"hydra.run.dir={run}"] if command[:1] == ["fit"] else [])]
    if is_done(folder, full):
        return run
    folder.mkdir(parents=True, exist_ok=True)
    with ending_by_exception():
        process = subprocess.Popen([sys.executable, "-m", "pl_pipe", *full])
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if code:
        sys.exit(f"the run ended with exit code {code}")
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


def wait_for_step(run: Path, step: int, *, poll_s: float = 0.2) -> None:
    while not (rows := steps(run)) or rows[-1]["step"] < step:
        time.sleep(poll_s)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(path)


def draw_lines(
    path: Path, lines: dict[str, tuple[Sequence[float], Sequence[float]]], *, x: str, y: str,
    marks: dict[str, float] | None = None,
) -> None:  # fmt: skip
    with figure(path, width=9, height=4) as drawn:
        axes = drawn.add_subplot()
        for place, (name, (across, up)) in enumerate(lines.items()):
            axes.plot(across, up, label=name, color=stage_colour(place), linewidth=1.1)
        for name, where in (marks or {}).items():
            axes.axvline(where, color="#888888", linewidth=0.8, linestyle="--")
            axes.annotate(name, (where, 1.0), xycoords=("data", "axes fraction"), fontsize=7, rotation=90, va="top")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    print(path)
