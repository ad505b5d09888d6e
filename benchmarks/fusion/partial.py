"""Partial fusion of ResNet-18: from none to all ten of its parts run once a variant, as HFTA's authors measured it.

    python benchmarks/fusion/partial.py --out DIR [--variants 8] [--mode "captured array"]

The parts, in the order in which they leave the array: eight blocks from the input on, the last layer, the first one.
"""

import argparse
import csv
from pathlib import Path

from gpu import EACH_S, wave

PARTS = [*(f"net.net.layer{layer}.{block}" for layer in range(1, 5) for block in (0, 1)), "net.net.fc", "net.net.conv1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--mode", default="captured array")
    parser.add_argument("--ready-s", type=float, default=120.0)
    parser.add_argument("--each-s", type=float, default=EACH_S, help="the longest that timing one of them may take")
    parser.add_argument("--block-s", type=float, default=0.25)
    parser.add_argument("--counts", type=int, nargs="+", default=list(range(len(PARTS) + 1)))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cells = [
        {
            "workload": "resnet18", "mode": options.mode, "variants": options.variants, "precision": options.precision,
            "block-s": options.block_s, "options": ["--fuse-except", *PARTS[:count]] if count else [],
        }
        for count in options.counts
    ]  # fmt: skip
    rows = wave(cells, ready_s=options.ready_s, logs=options.out, small=options.small, each_s=options.each_s)
    with (options.out / "partial.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, ["unfused", "variants", "precision", "mode", "samples_s", "error"], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows({"unfused": count, **row} for count, row in zip(options.counts, rows, strict=True))


if __name__ == "__main__":
    main()
