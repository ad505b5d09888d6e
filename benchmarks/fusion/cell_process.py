"""Cells as processes: one alone on the GPU to be timed, many at once to fill the compiler's cache, many under MPS.

cells -> *processes* -> rows. A cell says that it is ready by a file, and is timed when another one is there.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from forked import Forked

HERE = Path(__file__).parent
_CELL = [sys.executable, str(HERE / "cell.py")]
EACH_S = 60.0
"""The longest that timing a cell may take, unless asked otherwise."""
_LOOK_S = 0.1
_SETTLE_S = 1.5
"""In which processes that are timed together have all begun to compute."""
_MPS_FOLDER = f"fusion_mps_{os.getuid()}_"
_SAID = 20
"""Lines that are shown of what a cell without a result has said."""
_QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
"""The service outlives the command that starts it, and would hold on to the output's pipe."""
CellArguments = Mapping[str, Any]
"""By option of cell.py; `options` has further ones as they are."""


@dataclass(frozen=True)
class Limits:
    """How long cells may take."""

    ready_s: float = 240.0
    each_s: float = EACH_S


def started(command: Sequence[str], out: TextIO, environment: Mapping[str, str]) -> "Forked | subprocess.Popen[bytes]":
    """cell.py as a child with its modules loaded; any other program as it is."""
    if list(command[:2]) == _CELL:
        return Forked(command[2:], out, environment)
    return subprocess.Popen(command, stdout=out, stderr=out, cwd=HERE, env=environment)


class Cell:
    """A process that prepares, says so, waits, and is timed; it ends with the block that it was entered in."""

    def __init__(self, command: Sequence[str], folder: Path, name: str, threads: int = 2) -> None:
        self._gate, self.name = folder, name
        self._out = (folder / f"{name}.txt").open("w+")
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), "OMP_NUM_THREADS": "2"}
        self._process = started([*command, "--gate", str(folder), "--name", name], self._out, environment)

    def __enter__(self) -> "Cell":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._out.close()

    @property
    def is_ready(self) -> bool:
        return (self._gate / f"ready_{self.name}").exists()

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    def go(self, *, at: float | None = None) -> None:
        """`at` is the monotonic clock's, at which all that were told the same begin to count."""
        said = self._gate / f"saying_{self.name}"
        said.write_text("" if at is None else repr(at))
        said.rename(self._gate / f"go_{self.name}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def result(self, limit_s: float) -> dict[str, Any]:
        late = ""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.stop()
            late = f" within {limit_s:.0f} s"
        rows = [line for line in self.said() if line.startswith('{"workload"')]
        if rows:
            return dict(json.loads(rows[-1]))
        return {"error": f"no result{late}: {self._last_words()}"}

    def unready(self, limit_s: float) -> dict[str, Any]:
        return {"error": f"not ready after {limit_s:.0f} s: {self._last_words()}"}

    def said(self) -> list[str]:
        self._out.seek(0)
        return self._out.read().strip().splitlines()

    def _last_words(self) -> str:
        said = self.said()
        print("\n".join(f"  {self.name}: {line}" for line in said[-_SAID:]), file=sys.stderr, flush=True)
        return " | ".join(said[-3:])[-300:]


def command_of(cell: CellArguments, *, small: bool) -> list[str]:
    given = [str(item) for name, value in cell.items() if name != "options" for item in (f"--{name}", value)]
    return [*_CELL, *given, *cell.get("options", []), *(["--small"] if small else [])]


def threads_of(processes: int) -> int:
    """For the compiler of each of so many processes."""
    return max(2, (os.cpu_count() or 2) // processes)


def wait_until_ready(running: Sequence[Cell], ready_s: float) -> list[Cell]:
    """Those that were not ready in time, which are ended at once: they would compute while others are timed."""
    end = time.monotonic() + ready_s
    while time.monotonic() < end and not all(one.is_ready or one.is_over for one in running):
        time.sleep(_LOOK_S)
    late = [one for one in running if not one.is_ready and not one.is_over]
    for one in late:
        one.stop()
    return late


def measured_alone(command: Sequence[str], limits: Limits) -> dict[str, Any]:
    """A cell that prepares and is timed with the GPU and the machine to itself."""
    with tempfile.TemporaryDirectory() as folder, Cell(command, Path(folder), "alone", threads_of(1)) as one:
        if wait_until_ready([one], limits.ready_s):
            return one.unready(limits.ready_s)
        one.go()
        return one.result(limits.each_s)


def fill_cache(
    cells: Sequence[CellArguments],
    *,
    start: Callable[[CellArguments, Path, int], Cell],
    side_by_side: int,
    variants: int,
    within_s: float,
) -> None:
    """Cells prepared side by side and ended when they are ready: what they compiled is on the disk, and nothing that
    they timed meanwhile is kept. At most so many processes with so many variants in all, which share the memory."""
    waiting = list(cells)
    running: list[tuple[CellArguments, Cell]] = []
    end = time.monotonic() + within_s
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        while (waiting or running) and time.monotonic() < end:
            for pair in [pair for pair in running if pair[1].is_ready or pair[1].is_over]:
                pair[1].stop()
                running.remove(pair)
            while waiting and _fits(waiting[0], [cell for cell, _ in running], side_by_side, variants):
                cell = waiting.pop(0)
                number = len(cells) - len(waiting)
                running.append((cell, stack.enter_context(start(cell, Path(folder), number))))
            time.sleep(_LOOK_S)


def _fits(cell: CellArguments, running: Sequence[CellArguments], side_by_side: int, variants: int) -> bool:
    taken = sum(one["variants"] for one in running)
    return not running or (len(running) < side_by_side and taken + cell["variants"] <= variants)


@contextmanager
def mps() -> Iterator[None]:
    """The service that lets processes share the GPU at the same time. One that a killed call has left is ended."""
    for left in Path(tempfile.gettempdir()).glob(f"{_MPS_FOLDER}*"):
        _end_mps(left)
    folder = Path(tempfile.mkdtemp(prefix=_MPS_FOLDER))
    before = dict(os.environ)
    os.environ.update(_of_mps(folder))
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=60, **_QUIET)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        _end_mps(folder)


def _of_mps(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _end_mps(folder: Path) -> None:
    environment = {**os.environ, **_of_mps(folder)}
    with suppress(OSError, subprocess.SubprocessError):  # what was measured counts nevertheless
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=environment, check=False, timeout=60, **_QUIET)
    shutil.rmtree(folder, ignore_errors=True)


def measured_under_mps(command: Sequence[str], processes: int, limits: Limits) -> dict[str, Any]:
    """As many processes as variants, each training one model, all at once; the rates are added up."""
    try:
        with mps():
            return measured_at_once(command, processes, limits)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"MPS: {type(error).__name__}: {error}"[:300]}


def measured_at_once(command: Sequence[str], processes: int, limits: Limits) -> dict[str, Any]:
    """Only where all are ready: one that is late would be timed alone. All count in the same seconds, and compute
    before and after, since one that is slower would otherwise have the GPU to itself in the end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        running = [
            stack.enter_context(Cell(command, Path(folder), f"process{number}", threads_of(processes)))
            for number in range(processes)
        ]
        late = wait_until_ready(running, limits.ready_s)
        if late:
            return {"error": f"{len(late)} of {processes} processes {late[0].unready(limits.ready_s)['error']}"}
        failed = [one for one in running if not one.is_ready]
        if failed:
            error = failed[0].result(0.0).get("error", "ended before it was timed")
            return {"error": f"{len(failed)} of {processes} processes failed: {error}"}
        together = time.monotonic() + _SETTLE_S
        for one in running:
            one.go(at=together)
        found = [one.result(limits.each_s) for one in running]
    errors = [row["error"] for row in found if "error" in row]
    return {"error": errors[0]} if errors else added_up(found)


def added_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rates and torch's memory of all processes; what NVML says is of the whole card already."""
    row = {"samples_s": round(sum(one["samples_s"] for one in rows), 1)}
    if all("torch_gib" in one for one in rows):
        row["torch_gib"] = round(sum(one["torch_gib"] for one in rows), 2)
    if all("gpu_percent" in one for one in rows):
        row["gpu_percent"] = round(sum(one["gpu_percent"] for one in rows) / len(rows), 1)
        row["card_gib"] = max(one["card_gib"] for one in rows)
    return row
