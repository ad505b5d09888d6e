"""How many sequences a second one process reads of HDF5 shards and of text, and what memory that takes.

    python benchmarks/data/hdf5_reader.py                       # shards of 700 MB, limit 64 MiB
    python benchmarks/data/hdf5_reader.py --rows 300000 --compress

Shards are random, made in a temporary folder and removed. Batches come through the data module's own loader in the
training order, in this process (`num_workers=0`), so one core does it all. Memory is what the process has gained since
before the first batch: resident for shards; for text, anonymous, since pages of a mapped file are the system's to drop.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import torch

from pl_pipe.recipes.language.instances import KEYS, InstanceRule, empty_rows
from pl_pipe.recipes.language.pretraining_data import WikiData
from pl_pipe.recipes.language.text_data import Sequences, as_it_is
from pl_pipe.recipes.language.token_file import Part, frequent_tokens, numbered

ROWS_AT_ONCE = 50_000
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--sequence-length", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--shards", type=int, default=12)
    parser.add_argument("--compress", action="store_true")
    parser.add_argument("--text-lines", type=int, default=2_800_000)
    parser.add_argument("--limit-mib", type=int, default=64, help="memory that reading may take")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.rows:
            read_shards(folder, options)
        if options.text_lines:
            read_text(folder, options)


def read_shards(folder: Path, options: argparse.Namespace) -> None:
    rule = InstanceRule(options.sequence_length, most_masked=max(1, round(0.15 * options.sequence_length)))
    size = write_shards(folder, rule, options)
    data = WikiData(root=str(folder), vocabulary_size=30_522, batch_size=options.batch_size, num_workers=0)
    data.setup("fit")
    rates, gained = [], []
    for epoch in range(options.repeats):
        loader: Any = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        before, most, sequences = resident(), 0, 0
        start_s = time.process_time()
        for number, batch in enumerate(loader):
            sequences += len(batch["input_ids"])
            if number % 1024 == 0:
                most = max(most, resident() - before)
        rates.append(sequences / (time.process_time() - start_s))
        gained.append(most / MIB)
    print(
        f"HDF5{' (gzip)' if options.compress else ''}: {size / MIB:,.0f} MiB in {options.shards} shards, "
        f"{options.rows:,} sequences of {options.sequence_length}, batches of {options.batch_size}"
    )
    report(rates, gained, size, options)


def read_text(folder: Path, options: argparse.Namespace) -> None:
    path = folder / "text.txt"
    words = np.array([f"word{number}" for number in range(20_000)])
    random = np.random.default_rng(0)
    with path.open("w") as file:
        for _ in range(0, options.text_lines, 10_000):
            chosen = words[(random.pareto(1.0, (10_000, 40)) * 20).astype(int).clip(0, 19_999)]
            file.writelines(" ".join(line) + "\n" for line in chosen)
    before = anonymous()
    start_s = time.process_time()
    os.environ["PL_PIPE_CACHE"] = str(folder / "cache")
    tokens = numbered(Part(path), frequent_tokens(Part(path), unit="word", size=33_278), unit="word")
    encode_s = time.process_time() - start_s
    encoding = (anonymous() - before) / MIB
    data: Any = Sequences(tokens, length=options.sequence_length, path=path)
    rates, gained = [], []
    for _ in range(options.repeats):
        loader = torch.utils.data.DataLoader(data, options.batch_size, sampler=range(len(data)), collate_fn=as_it_is)
        before, most, sequences = anonymous(), 0, 0
        start_s = time.process_time()
        for number, (batch, _) in enumerate(loader):
            sequences += len(batch)
            if number % 1024 == 0:
                most = max(most, anonymous() - before)
        rates.append(sequences / (time.process_time() - start_s))
        gained.append(most / MIB)
    size = path.stat().st_size
    print(
        f"text: {size / MIB:,.0f} MiB, {len(tokens):,} tokens numbered in {encode_s:.0f} s "
        f"({len(tokens) / encode_s:,.0f} a second), which left {encoding:.0f} MiB; "
        f"{len(data):,} sequences of {options.sequence_length}"
    )
    report(rates, gained, size, options)


def report(rates: list[float], gained: list[float], size: int, options: argparse.Namespace) -> None:
    within = max(gained) <= options.limit_mib
    print(
        f"    {statistics.median(rates):,.0f} sequences a second of processor time (from {min(rates):,.0f} to "
        f"{max(rates):,.0f}, {len(rates)} epochs); memory gained by epoch: "
        f"{', '.join(f'{value:.1f}' for value in gained)} MiB, {'within' if within else 'ABOVE'} the limit of "
        f"{options.limit_mib} MiB; the corpus is {size / MIB / options.limit_mib:.1f} times the limit"
    )


def write_shards(folder: Path, rule: InstanceRule, options: argparse.Namespace) -> int:
    random = np.random.default_rng(0)
    per_shard = -(-options.rows // options.shards)
    size = 0
    for number in range(options.shards):
        path = folder / f"train_{number:03d}.hdf5"
        with h5py.File(path, "w") as file:
            for name, kind in KEYS.items():
                inner = empty_rows(0, rule)[name].shape[1:]
                settings = {"compression": "gzip", "chunks": (256, *inner)} if options.compress else {}
                data = file.create_dataset(name, (per_shard, *inner), kind, **settings)
                for first in range(0, per_shard, ROWS_AT_ONCE):
                    count = min(ROWS_AT_ONCE, per_shard - first)
                    most = 30_522 if kind == "i4" else 2
                    if name == "masked_lm_positions":
                        most = rule.sequence_length
                    data[first : first + count] = random.integers(0, most, (count, *inner), dtype=kind)
        size += path.stat().st_size
    return size


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return resident()


if __name__ == "__main__":
    main()
