"""What a rank of a pipeline holds: parameters, weight versions and resident memory, beside a single process.

    python benchmarks/pipeline/memory.py                # --quick: fewer batches

Eight layers of 1,280 x 1,280 (52 MB of parameters) over 4 stages. `parameters` are the bytes of those that are not on
the meta device; `versions` the most weight versions kept at a time, beside the bound: warm-up + 1 for `pipedream`, 2
for `pipedream_2bw`, 1 for the others. `resident` is what the process has grown by since before it built the model
(memory of its own, not shared with other processes), at the batch where that was most; it holds parameters, gradients,
older versions and a batch's activations. Gradients are as large as parameters. A small model has run before, so that
what the first run of a process takes (modules, gloo's buffers) is not in it, and torch's allocator is told to give
memory back at once, which it otherwise keeps for later (`MIMALLOC_PURGE_DELAY=0`).

Goals: versions within the bound; parameters of other stages take no memory.
"""

import argparse
import ctypes
import gc
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import psutil
import torch
from ranks import busy, prepare, run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

LAYERS, WIDTH, STAGES, BATCH = 8, 1280, 4, 8


class Layers(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))

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


class Watch(L.Callback):
    def __init__(self, before_bytes: int) -> None:
        self.before_bytes = before_bytes
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
        self.held = Held(stage, bytes_here, versions, bound, max(self.resident_bytes))


def own_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def held(schedule: str | None, batches: int) -> Held:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trained(schedule, batches, width=16)
    return trained(schedule, batches, width=WIDTH)


def trained(schedule: str | None, batches: int, *, width: int) -> Held:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    watch = Watch(own_bytes())
    torch.manual_seed(0)
    pipeline: Any = "auto"
    if schedule is not None:
        ends = [LAYERS * (stage + 1) // STAGES - 1 for stage in range(STAGES - 1)]
        pipeline = PipeDreamStrategy(schedule=schedule, split_points=[f"layers.{end}" for end in ends], timeout_s=60)
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
    trainer.fit(Layers(width), DataLoader(TensorDataset(torch.randn(BATCH * batches, width)), BATCH))
    assert watch.held is not None
    return watch.held


def row(name: str, found: Held) -> str:
    within = "" if found.versions <= found.bound else " EXCEEDED"
    return (
        f"| {name} | {found.stage} | {found.parameter_bytes / 1e6:.1f} MB | {found.versions} (at most {found.bound})"
        f"{within} | {found.resident_bytes / 1e6:.0f} MB |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=("pipedream", "pipedream_2bw", "1f1b", "gpipe"))
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepare(MIMALLOC_PURGE_DELAY="0", MALLOC_MMAP_THRESHOLD_="1000000")
    batches = 8 if arguments.quick else arguments.batches
    print(f"{busy()}; {batches} batches\n")
    print("| schedule | stage | parameters | versions | resident |")
    print("|---|---|---|---|---|")
    print(row("single process", run_ranks(held, 1, None, batches)[0]), flush=True)
    for schedule in arguments.schedules:
        for found in sorted(run_ranks(held, STAGES, schedule, batches), key=lambda item: item.stage):
            print(row(schedule, found), flush=True)


if __name__ == "__main__":
    main()
