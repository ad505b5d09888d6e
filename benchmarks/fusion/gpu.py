"""Variants of six workloads on one GPU: FusionStrategy through `trainer.fit` against other ways to train them.

    python benchmarks/fusion/gpu.py --workload bert --out DIR [--variants 1 2 4 8 16 32] [--precision bf16 tf32]

Each cell is a process of its own (cell.py) that prepares and is timed with the GPU to itself, peers as FusionStrategy:
cuDNN chooses algorithms by timing them, and so does `auto`. The same cell may differ by 5 % from one process to the
next: `--repeats` measures each several times, in turn with its peers. Before that, what the compiler needs cores for is
compiled side by side, for the cache on the disk alone. A row goes to `speed.csv` as soon as it is there; a second call
with the same `--run` measures what is missing. At the end curves of the run are drawn beside it (figures.py draws them
again, and others); speed_report.py makes tables of the rows.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cell_process import (
    EACH_S,
    Cell,
    CellArguments,
    Limits,
    command_of,
    fill_cache,
    measured_alone,
    measured_under_mps,
    threads_of,
)
from figures import of_speed
from modes import (
    ALL,
    AUTO,
    AUTO_TUNED,
    COMPILED,
    MPS,
    ONE_MODEL,
    PEERS,
    PLAIN_BRANCHES,
    PLAIN_LIGHTNING,
    SERIAL_COMPILED,
    WORKLOADS,
)
from speed_rows import RUN_COLUMNS, append, check_columns, done, gpu_name, key, now, read, run_name
from speeds import of_run, read_runs

CELL = ("workload", "precision", "variants", "mode")
COLUMNS = (
    *CELL, "samples_s", "step_ms", "alone_s", "chosen", "tried", "gpu_percent", "card_gib", "torch_gib", "took_s",
    "error", *RUN_COLUMNS,
)  # fmt: skip


def cells_of(
    workloads: Sequence[str], variants: Sequence[int], precisions: Sequence[str], modes: Sequence[str]
) -> list[list[dict[str, Any]]]:
    """A list for every precision and number of variants, workload by workload: a call that is stopped has whole
    comparisons. Ways to train one model are measured once, plain Lightning only where an array of one is."""
    portions = []
    for precision in precisions:
        for place, count in enumerate(variants):
            portion = []
            for workload in workloads:
                for mode in modes:
                    alone = mode in ONE_MODEL
                    if (alone and place) or (mode == PLAIN_LIGHTNING and 1 not in variants):
                        continue
                    values = workload, precision, 1 if alone else count, mode
                    portion.append(dict(zip(CELL, values, strict=True)))
            portions.append(portion)
    return portions


def to_compile(cells: Sequence[CellArguments]) -> list[dict[str, Any]]:
    """Cells that compile what these will: plain models are the same in one process, in many and as branches."""
    found: list[dict[str, Any]] = []
    for cell in cells:
        if cell["mode"] in (SERIAL_COMPILED, PLAIN_BRANCHES, MPS):
            one = {**cell, "mode": SERIAL_COMPILED, "variants": 1}
        elif cell["mode"] in (AUTO, AUTO_TUNED, *COMPILED):
            one = dict(cell)
        else:
            continue
        if one not in found:
            found.append(one)
    return found


def compile_side_by_side(cells: Sequence[CellArguments], options: argparse.Namespace) -> None:
    threads = threads_of(min(options.wave, len(cells)))

    def started(cell: CellArguments, folder: Path, number: int) -> Cell:
        return Cell(command_of(cell, small=options.small), folder, f"cell{number}", threads)

    fill_cache(
        cells, start=started, side_by_side=options.wave, variants=options.wave_variants, within_s=options.ready_s
    )


def measured(cell: CellArguments, *, block_s: float, small: bool, limits: Limits) -> dict[str, Any]:
    if cell["mode"] != MPS:
        return measured_alone(command_of({**cell, "block-s": block_s}, small=small), limits)
    one = {**cell, "mode": SERIAL_COMPILED, "variants": 1, "block-s": max(0.6, block_s)}
    return measured_under_mps(command_of(one, small=small), cell["variants"], limits)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--precision", nargs="+", default=["bf16", "tf32"], choices=["bf16", "tf32"])
    parser.add_argument("--modes", nargs="+", default=[AUTO, *PEERS, PLAIN_LIGHTNING], choices=ALL)
    parser.add_argument("--run", help="what rows that are compared have in common; by default the day")
    parser.add_argument("--repeats", type=int, default=1, help="how often each cell is measured; tables have medians")
    parser.add_argument("--retry", action="store_true", help="measure again what ended in an error in this run")
    parser.add_argument("--wave", type=int, default=12, help="processes that compile side by side; 1 for none")
    parser.add_argument("--wave-variants", type=int, default=64, help="variants of all processes that do so")
    parser.add_argument("--ready-s", type=float, default=240.0, help="the longest that a cell may prepare")
    parser.add_argument("--each-s", type=float, default=EACH_S, help="the longest that timing a cell may take")
    parser.add_argument("--block-s", type=float, default=1.0, help="of timing, several times without a pause")
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to see that all works")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cells and MPS are ended then
    path = options.out / "speed.csv"
    check_columns(path, COLUMNS)
    run, gpu = run_name(options.run, small=options.small), gpu_name()
    limits = Limits(options.ready_s, options.each_s)
    there = done(read(path), CELL, run=run, gpu=gpu, failed_too=not options.retry)
    failures = []
    for cells in cells_of(options.workload, options.variants, options.precision, options.modes):
        missing = [cell for repeat in range(options.repeats) for cell in cells if there[key(cell, CELL)] <= repeat]
        compiled = to_compile(missing)
        if options.wave > 1 and len(compiled) > 1:
            print(f"compiling for {len(compiled)} cells, of {len(missing)} to be measured", flush=True)
            compile_side_by_side(compiled, options)
        for cell in missing:
            found = measured(cell, block_s=options.block_s, small=options.small, limits=limits)
            row = {**found, **cell, "run": run, "date": now(), "gpu": gpu}
            append(path, COLUMNS, row)
            print(json.dumps(row), flush=True)
            if "error" in row:
                failures.append(f"{', '.join(str(cell[name]) for name in CELL)}: {row['error']}")
    rows = read_runs(options.out)
    if any(row["run"] == run for row in rows):
        print("\n".join(map(str, of_speed(of_run(rows, run), options.out))), flush=True)
    if failures:
        raise SystemExit(f"{len(failures)} cells failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
