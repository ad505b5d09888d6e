"""What a rank of a pipeline holds: parameters, weight versions and resident memory, beside a single process.

    python benchmarks/pipeline/memory.py                # --quick: fewer batches

Eight layers of 1,280 x 1,280 (52 MB of parameters) over 4 stages. `parameters` are the bytes of those that are not on
the meta device; `versions` the most weight versions kept at a time, beside the bound: warm-up + 1 for `pipedream`, 2
for `pipedream_2bw`, 1 for the others. `resident` is what the process has grown by since before it built the model
(memory of its own, not shared with other processes), at the batch where that was most; it holds parameters, gradients,
older versions and a batch's activations. Gradients are as large as parameters. A small model has run before, so that
what the first run of a process takes (modules, gloo's buffers) is not in it, and torch's allocator is told to give
memory back at once, which it otherwise keeps for later (`MIMALLOC_PURGE_DELAY=0`).

With `--recompute` another table: 32 layers of 64 x 64 with a tanh each on batches of 8,192, 2.1 MB a layer's output,
over 4 stages, so that activations are what counts; plainly and with `recompute=true`. `waiting` is as `resident` above;
`peak` the most that the process had grown by at any moment (VmHWM, reset before the model is built).

Goals: versions within the bound; parameters of other stages take no memory; with `recompute` a waiting batch takes its
input alone.
"""

import argparse
import ctypes
import gc
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from ranks import busy, prepare, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

LAYERS, WIDTH, STAGES, BATCH = 8, 1280, 4, 8
DEEP_LAYERS, DEEP_WIDTH, DEEP_BATCH = 32, 64, 8192


@dataclass(frozen=True)
class Load:
    """What is trained, and on how much."""

    layers: int = LAYERS
    width: int = WIDTH
    batch: int = BATCH
    squashed: bool = False
    """A tanh after each layer, whose output waits for backward."""
    recompute: bool = False

    def small(self) -> "Load":
        return replace(self, width=16, batch=8)


class Layers(L.LightningModule):
    def __init__(self, load: Load) -> None:
        super().__init__()
        last = nn.Tanh if load.squashed else nn.Identity
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(load.width, load.width), last()) for _ in range(load.layers))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@dataclass(frozen=True)
class Held:
    """By one rank."""

    stage: int
    parameter_bytes: int
    versions: int
    bound: int
    resident_bytes: int
    peak_bytes: int


class Watch(L.Callback):
    def __init__(self) -> None:
        self.before_bytes, self.before_peak_bytes = own_bytes(), reset_peak_bytes()
        self.resident_bytes: list[int] = []
        self.held: Held | None = None

    def on_train_batch_end(self, trainer: Any, module: L.LightningModule, *_: Any) -> None:
        self.resident_bytes.append(own_bytes() - self.before_bytes)
        strategy = trainer.strategy
        bytes_here = sum(p.numel() * p.element_size() for p in module.parameters() if not p.is_meta)
        stage, versions, bound = 0, 1, 1
        if isinstance(strategy, PipeDreamStrategy):
            assert strategy.executor is not None
            assert strategy.divided is not None
            settings = strategy.executor.settings
            stage, versions = strategy.divided.stage, strategy.executor.versions.peak
            bound = {"pipedream": settings.warmup + 1, "pipedream_2bw": 2}.get(settings.schedule, 1)
        self.held = Held(stage, bytes_here, versions, bound, max(self.resident_bytes), 0)

    def on_train_end(self, *_: Any) -> None:
        assert self.held is not None
        self.held = replace(self.held, peak_bytes=status_bytes("VmHWM") - self.before_peak_bytes)


def own_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def reset_peak_bytes() -> int:
    """The kernel notes the most from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def held(schedule: str | None, batches: int, load: Load) -> Held:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trained(schedule, batches, load.small())
    return trained(schedule, batches, load)


def trained(schedule: str | None, batches: int, load: Load) -> Held:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    watch = Watch()
    torch.manual_seed(0)
    pipeline: Any = "auto"
    if schedule is not None:
        ends = [load.layers * (stage + 1) // STAGES - 1 for stage in range(STAGES - 1)]
        pipeline = PipeDreamStrategy(
            schedule=schedule,
            split_points=[f"layers.{end}" for end in ends],
            timeout_s=60,
            recompute=load.recompute,
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if schedule is None else STAGES,
        strategy=pipeline,
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(load.batch, load.width).expand(batches, -1, -1)), batch_size=None)
    trainer.fit(Layers(load), data)
    assert watch.held is not None
    return watch.held


def row(name: str, found: Held) -> str:
    within = "" if found.versions <= found.bound else " EXCEEDED"
    return (
        f"| {name} | {found.stage} | {found.parameter_bytes / 1e6:.1f} MB | {found.versions} (at most {found.bound})"
        f"{within} | {found.resident_bytes / 1e6:.0f} MB |"
    )


def deep_row(name: str, found: Held) -> str:
    return f"| {name} | {found.stage} | {found.resident_bytes / 1e6:.0f} MB | {found.peak_bytes / 1e6:.0f} MB |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=("pipedream", "pipedream_2bw", "1f1b", "gpipe"))
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="the second table instead of the first")
    arguments = parser.parse_args()
    prepare(MIMALLOC_PURGE_DELAY="0", MALLOC_MMAP_THRESHOLD_="1000000")
    batches = 8 if arguments.quick else arguments.batches
    print(f"{busy()}; {batches} batches\n")
    if arguments.recompute:
        recomputed(arguments.schedules, batches)
        return
    print("| schedule | stage | parameters | versions | resident |")
    print("|---|---|---|---|---|")
    print(row("single process", run_ranks(held, 1, None, batches, Load())[0]), flush=True)
    for schedule in arguments.schedules:
        for found in sorted(run_ranks(held, STAGES, schedule, batches, Load()), key=lambda item: item.stage):
            print(row(schedule, found), flush=True)


def recomputed(schedules: Sequence[str], batches: int) -> None:
    load = Load(DEEP_LAYERS, DEEP_WIDTH, DEEP_BATCH, squashed=True)
    print("| schedule | stage | waiting | peak |")
    print("|---|---|---|---|")
    for schedule in schedules:
        for name, chosen in ((schedule, load), (f"{schedule}, recompute", replace(load, recompute=True))):
            for found in sorted(run_ranks(held, STAGES, schedule, batches, chosen), key=lambda item: item.stage):
                print(deep_row(name, found), flush=True)


if __name__ == "__main__":
    main()
