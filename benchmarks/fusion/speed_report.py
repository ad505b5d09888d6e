"""Tables of what gpu.py measured, and what they say of fusion. speed.csv -> *report* -> text for docs/fusion.md.

    python benchmarks/fusion/speed_report.py DIR [--run NAME] [--precision bf16] [--variants 8]

Rates are compared within one run on one GPU only; what has no row is `-`.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from modes import MPS, PEERS, PLAIN_LIGHTNING, SERIAL
from speeds import Speeds, of_run, read_runs


def table(speeds: Speeds, count: int) -> str:
    """Thousand samples a second, and multiples of serial eager."""
    modes = [mode for mode in speeds.modes if mode != PLAIN_LIGHTNING]
    lines = [f"| workload | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|"]
    for workload in speeds.workloads:
        cells = []
        for mode in modes:
            rate, ratio = speeds.rate(workload, mode, count), speeds.ratio(workload, mode, count)
            times = f" ({ratio:.1f} ×)" if ratio is not None and mode != SERIAL else ""
            cells.append("-" if rate is None else f"{rate / 1e3:.4g}{times}")
        lines.append(f"| {workload} | {' | '.join(cells)} |")
    return "\n".join(lines)


def goals(speeds: Speeds, count: int, mode: str) -> list[str]:
    """Against the best of all other ways, against MPS and against serial eager, with what was not measured."""
    best, mps, serial = [], [], []
    for workload in speeds.workloads:
        ours = speeds.rate(workload, mode, count)
        if ours is None:
            best.append(f"{workload} not measured")
            continue
        peers = {peer: rate for peer in PEERS if (rate := speeds.rate(workload, peer, count)) is not None}
        missing = [peer for peer in PEERS if peer not in peers]
        lacks = f", without {' and '.join(missing)}" if missing else ""
        if peers:
            first = max(peers, key=lambda peer: peers[peer])
            spread = _spread(speeds, workload, (mode, first), count)
            best.append(f"{workload} {ours / peers[first]:.3f} ({first}{lacks}{spread})")
        for name, into in ((MPS, mps), (SERIAL, serial)):
            ratio = speeds.ratio(workload, mode, count, to=name)
            into.append(f"{workload} {'not measured' if ratio is None else f'{ratio:.2f}'}")
    return [
        f"`{mode}` over the best other way: {'; '.join(best) or 'not measured'}",
        f"`{mode}` over mps: {'; '.join(mps) or 'not measured'}",
        f"`{mode}` over {SERIAL}: {'; '.join(serial) or 'not measured'}",
    ]


def _spread(speeds: Speeds, workload: str, modes: tuple[str, str], count: int) -> str:
    """Least and most of both, where they were measured more than once."""
    ours, theirs = (speeds.rates(workload, mode, count) for mode in modes)
    if len(ours) == len(theirs) == 1:
        return ""
    first, second = (f"{min(found) / 1e3:.4g} to {max(found) / 1e3:.4g} in {len(found)}" for found in (ours, theirs))
    return f"; {first} against {second}"


def overhead(speeds: Speeds, modes: Iterable[str]) -> list[str]:
    """Time of a step of an array of one over plain Lightning's, less one."""
    lines = []
    for mode in modes:
        found = []
        for workload in speeds.workloads:
            ratio = speeds.ratio(workload, mode, 1, to=PLAIN_LIGHTNING)
            if ratio is not None:
                found.append(f"{workload} {1 / ratio - 1:+.1%}")
        lines.append(
            f"`{mode}`, one variant, a step's time over plain Lightning's: {'; '.join(found) or 'not measured'}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--run", help="by default the last one")
    parser.add_argument("--precision", nargs="+", default=["bf16", "tf32"])
    parser.add_argument("--variants", type=int, help="by default the most that all workloads have")
    options = parser.parse_args()
    rows = of_run(read_runs(options.folder), options.run)
    for precision in options.precision:
        speeds = Speeds.of(rows, precision)
        count = options.variants or speeds.common_count()
        if count is None or not speeds.workloads:
            print(f"{precision}: not measured\n")
            continue
        ours = [mode for mode in speeds.modes if mode not in (*PEERS, PLAIN_LIGHTNING)]
        print(f"{rows[-1]['run']}, {rows[-1].get('gpu') or 'GPU not noted'}: {count} variants, {precision}\n")
        print(f"{table(speeds, count)}\n")
        lines = [line for mode in ours for line in goals(speeds, count, mode)] + overhead(speeds, ours)
        print("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
