"""Partial fusion of ResNet-18: from none to all ten of its parts run once a variant, as HFTA's authors measured it.

    python benchmarks/fusion/partial.py --out DIR [--variants 8] [--mode "captured array"]

The parts, in the order in which they leave the array: eight blocks from the input on, the last layer, the first one.
What is fused is so as usual, and not in the way that is quickest for each layer.
Each is measured alone; a row goes to `partial.csv` as soon as it is there, and a second call with the same `--run`
measures what is missing.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from cell_process import EACH_S, Limits, command_of, measured_alone
from speed_rows import RUN_COLUMNS, append, check_columns, done, gpu_name, key, now, read, run_name

PARTS = [*(f"net.net.layer{layer}.{block}" for layer in range(1, 5) for block in (0, 1)), "net.net.fc", "net.net.conv1"]
CELL = ("unfused", "variants", "precision", "mode")
COLUMNS = (
    *CELL, "samples_s", "step_ms", "alone_s", "chosen", "gpu_percent", "card_gib", "torch_gib", "error", *RUN_COLUMNS,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--mode", default="captured array")
    parser.add_argument("--run", help="what rows that are compared have in common; by default the day")
    parser.add_argument("--retry", action="store_true", help="measure again what ended in an error in this run")
    parser.add_argument("--ready-s", type=float, default=120.0)
    parser.add_argument("--each-s", type=float, default=EACH_S, help="the longest that timing one of them may take")
    parser.add_argument("--block-s", type=float, default=1.0, help="of timing, several times without a pause")
    parser.add_argument("--counts", type=int, nargs="+", default=list(range(len(PARTS) + 1)))
    parser.add_argument("--small", action="store_true", help="tiny batches, to see that all works")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cell is ended then
    path = options.out / "partial.csv"
    check_columns(path, COLUMNS)
    run, gpu = run_name(options.run, small=options.small), gpu_name()
    there = done(read(path), CELL, run=run, gpu=gpu, failed_too=not options.retry)
    failures = []
    for count in options.counts:
        cell = dict(zip(CELL, (count, options.variants, options.precision, options.mode), strict=True))
        if key(cell, CELL) in there:
            continue
        arguments = {
            "workload": "resnet18", "mode": options.mode, "variants": options.variants, "precision": options.precision,
            "block-s": options.block_s, "layers": "usual",
            "options": ["--fuse-except", *PARTS[:count]] if count else [],
        }  # fmt: skip
        found = measured_alone(
            command_of(arguments, small=options.small), Limits(options.ready_s, options.each_s)
        )  # fmt: skip
        row = {**found, **cell, "run": run, "date": now(), "gpu": gpu}
        append(path, COLUMNS, row)
        print(json.dumps(row), flush=True)
        if "error" in row:
            failures.append(f"{count} unfused: {row['error']}")
    if failures:
        raise SystemExit(f"{len(failures)} cells failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
