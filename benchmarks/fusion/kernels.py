"""Which kernels a captured step runs, how often and for how long; and where two ways to train differ in them.

    python benchmarks/fusion/kernels.py --out DIR [--workload resnet18 mobilenet] [--variants 1 8] [--autotuned 3 0]

Trains each workload as FusionStrategy's `compiled branches` and as branches of plain compiled models, one after the
other on an idle GPU, and prints their times and the kernels that make the difference. Then the same for steps through
`trainer.fit` beside their replay alone: what Lightning and the strategy add.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from modes import PLAIN_BRANCHES, WORKLOADS
from torch.profiler import ProfilerActivity, profile

OURS = "compiled branches"
Kernels = dict[str, tuple[float, float]]
"""Calls and microseconds a step, by name."""
_NONE = (0.0, 0.0)
STEPS = 5
_SHOWN = 15


def write_kernels(step: Callable[[], None], path: Path) -> None:
    with kernels_written(path):
        for _ in range(STEPS):
            step()


@contextmanager
def kernels_written(path: Path) -> Iterator[None]:
    """Around STEPS steps: a line for each kernel, the one that takes most first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found: Kernels = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls, us = found.get(event.name, _NONE)
            found[event.name] = calls + 1 / STEPS, us + event.device_time_total / STEPS
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["kernel", "calls", "us"])
        for name, (calls, us) in sorted(found.items(), key=lambda one: -one[1][1]):
            writer.writerow([name, f"{calls:g}", f"{us:.1f}"])


def read_kernels(path: Path) -> Kernels:
    with path.open(newline="") as file:
        return {row["kernel"]: (float(row["calls"]), float(row["us"])) for row in csv.DictReader(file)}


def differences(ours: Kernels, plain: Kernels, names: tuple[str, str] = ("ours", "plain")) -> list[str]:
    """Kernels by how much longer one side runs them. Streams overlap, so that sums exceed the step."""
    lines = []
    for name, of_one in zip(names, (ours, plain), strict=True):
        calls, us = sum(calls for calls, _ in of_one.values()), sum(us for _, us in of_one.values())
        lines.append(f"  {name}: {calls:.0f} kernels, {us:.0f} us in all")
    gaps = {name: ours.get(name, _NONE)[1] - plain.get(name, _NONE)[1] for name in {*ours, *plain}}
    for name in sorted(gaps, key=lambda one: -abs(gaps[one]))[:_SHOWN]:
        mine, theirs = (f"{calls:g} in {us:.1f}" for calls, us in (ours.get(name, _NONE), plain.get(name, _NONE)))
        lines.append(f"  {gaps[name]:+9.1f} us ({names[0]} {mine}, {names[1]} {theirs})  {name[:90]}")
    return lines


def through_fit(path: Path) -> Path:
    return path.with_name(f"{path.stem}_through_fit.csv")


def measured(mode: str, path: Path, options: list[str]) -> dict[str, Any]:
    through = ["--kernels-through-fit", str(through_fit(path).resolve())] if mode == OURS else []
    command = [sys.executable, "cell.py", "--mode", mode, "--kernels", str(path.resolve()), *through, *options]
    text = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    rows = [line for line in text.splitlines() if line.startswith('{"workload"')]
    return dict(json.loads(rows[-1])) if rows else {"error": text[-300:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--variants", type=int, nargs="+", default=[8])
    parser.add_argument("--autotuned", type=int, nargs="+", default=[3], help="algorithms that cuDNN times; 0 for none")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--small", action="store_true", help="tiny models and batches, to see that all works")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for workload, variants, tuned in itertools.product(options.workload, options.variants, options.autotuned):
        print(f"{workload}, {variants} variants, {tuned} algorithms timed", flush=True)
        asked = ["--workload", workload, "--variants", str(variants), "--autotuned", str(tuned)]
        asked += ["--precision", options.precision, *(["--small"] if options.small else [])]
        found: list[Kernels] = []
        added: list[str] = []
        for mode in (OURS, PLAIN_BRANCHES):
            path = options.out / f"kernels_{workload}_{variants}_{tuned}_{mode.split()[0]}.csv"
            row = measured(mode, path, asked)
            alone = f", replay alone {1e3 * row['alone_s']:.3f} ms" if row.get("alone_s") else ""
            print(f"  {mode}: {row.get('step_ms')} ms a step{alone} {row.get('error', '')}", flush=True)
            found.append(read_kernels(path) if path.exists() else {})
            if through_fit(path).exists():
                added = differences(read_kernels(through_fit(path)), found[-1], ("through fit", "alone"))
        print("\n".join([*differences(*found), *added]), flush=True)


if __name__ == "__main__":
    main()
