"""Variants of six workloads on one GPU: FusionStrategy through `trainer.fit` against other ways to train them.

    python benchmarks/fusion/gpu.py --workload bert --out DIR [--variants 1 2 4 8 16 32] [--precision bf16 tf32]

Each cell is a process of its own (cell.py). Cells of a wave prepare side by side, since compiling takes CPU cores; then
one at a time is timed, with the GPU to itself. Rows go to `speed.csv` as they come; figures.py draws them.
"""

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cell import PEERS
from workloads import WORKLOADS

HERE = Path(__file__).parent
MPS = "mps"
COLUMNS = (
    "workload", "precision", "variants", "mode", "samples_s", "step_ms", "alone_s", "chosen", "tried", "gpu_percent",
    "card_gib", "torch_gib", "took_s", "error",
)  # fmt: skip
EACH_S = 40.0
"""The longest that timing a cell may take, unless asked otherwise."""


class Cell:
    """A process that prepares, says so, waits, and is timed."""

    def __init__(self, number: int, arguments: list[str], gate: Path, logs: Path) -> None:
        self.name = f"c{number}"
        self._gate = gate
        self._out = (logs / f"{self.name}.txt").open("w+")
        command = [sys.executable, str(HERE / "cell.py"), *arguments, "--gate", str(gate), "--name", self.name]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
        self._process = subprocess.Popen(command, stdout=self._out, stderr=self._out, cwd=HERE, env=environment)

    @property
    def is_ready(self) -> bool:
        return (self._gate / f"ready_{self.name}").exists()

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def go(self) -> None:
        (self._gate / f"go_{self.name}").touch()

    def result(self, limit_s: float) -> dict[str, Any]:
        late = ""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            late = f" within {limit_s:.0f} s"
        self._out.seek(0)
        text = self._out.read()
        rows = [line for line in text.splitlines() if line.startswith('{"workload"')]
        if rows:
            return dict(json.loads(rows[-1]))
        return {"error": f"no result{late}: " + " | ".join(text.strip().splitlines()[-3:])[-300:]}


def wave(
    cells: list[dict[str, Any]], *, ready_s: float, logs: Path, small: bool, each_s: float = EACH_S
) -> list[dict[str, Any]]:
    """Cells prepared side by side and timed one after another."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, cell in enumerate(cells):
            options = {key: value for key, value in cell.items() if key != "options"}
            arguments = [str(item) for key, value in options.items() for item in (f"--{key}", value)]
            arguments += [*cell.get("options", []), *(["--small"] if small else [])]
            running.append(Cell(number, arguments, Path(folder), logs))
        end = time.monotonic() + ready_s
        while time.monotonic() < end and not all(one.is_ready or one.is_over for one in running):
            time.sleep(0.2)
        rows = []
        for cell, one in zip(cells, running, strict=True):
            if not one.is_ready and not one.is_over:
                row: dict[str, Any] = {**one.result(0.0), "error": f"not ready after {ready_s:.0f} s"}
            else:
                one.go()
                row = one.result(each_s)
            rows.append({**{key: value for key, value in cell.items() if key != "options"}, **row})
            print(json.dumps(rows[-1]), flush=True)
        return rows


@contextmanager
def mps() -> Iterator[None]:
    """The service that lets processes share the GPU at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        before = dict(os.environ)
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)
            os.environ.clear()
            os.environ.update(before)


def under_mps(
    workload: str, variants: int, precision: str, *, ready_s: float, logs: Path, small: bool
) -> dict[str, Any]:
    """As many processes as variants, each training one model, all at once; the rates are added up."""
    cell = {"workload": workload, "mode": "serial compiled", "variants": 1, "precision": precision, "block-s": 0.6}
    with mps(), tempfile.TemporaryDirectory() as folder:
        arguments = [str(item) for key, value in cell.items() for item in (f"--{key}", value)]
        running = [
            Cell(number, [*arguments, *(["--small"] if small else [])], Path(folder), logs)
            for number in range(variants)
        ]
        end = time.monotonic() + ready_s
        while time.monotonic() < end and not all(one.is_ready or one.is_over for one in running):
            time.sleep(0.2)
        for one in running:
            one.go()
        rows = [one.result(EACH_S) for one in running]
    row: dict[str, Any] = {"workload": workload, "mode": MPS, "variants": variants, "precision": precision}
    errors = [found["error"] for found in rows if "error" in found]
    if errors:
        return {**row, "error": errors[0]}
    return {**row, "samples_s": round(sum(found["samples_s"] for found in rows), 1)}


def append(rows: list[dict[str, Any]], path: Path) -> None:
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--precision", nargs="+", default=["bf16", "tf32"], choices=["bf16", "tf32"])
    parser.add_argument("--modes", nargs="+", default=["auto", *PEERS, MPS])
    parser.add_argument("--wave", type=int, default=12, help="processes that prepare side by side")
    parser.add_argument("--ready-s", type=float, default=240.0, help="the longest that a wave may prepare")
    parser.add_argument("--block-s", type=float, default=0.25)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "speed.csv"
    cells = [
        {"workload": workload, "mode": mode, "variants": count, "precision": precision, "block-s": options.block_s}
        for precision, count, workload, mode in itertools.product(
            options.precision, options.variants, options.workload, options.modes
        )
        if mode != MPS and (count == options.variants[0] or not mode.startswith("serial"))
    ]
    alone = [cell for cell in cells if str(cell["mode"]).startswith("auto")] if len(options.modes) > 1 else []
    together = [cell for cell in cells if cell not in alone]
    for start in range(0, len(together), options.wave):
        append(
            wave(
                together[start : start + options.wave], ready_s=options.ready_s, logs=options.out, small=options.small
            ),
            path,
        )
    for cell in alone:  # it compares formulations while it prepares, for which it needs the GPU to itself
        append(wave([cell], ready_s=options.ready_s, logs=options.out, small=options.small), path)
    if MPS in options.modes:
        for precision, count, workload in itertools.product(options.precision, options.variants, options.workload):
            row = under_mps(
                workload, count, precision, ready_s=options.ready_s, logs=options.out, small=options.small
            )  # fmt: skip
            print(json.dumps(row), flush=True)
            append([row], path)


if __name__ == "__main__":
    main()
