"""What pl-pipe's callbacks add to a training step: the same model and data in a plain Trainer, sides alternating.

The steps are made short on purpose (a small VGG-16 on few samples): the shorter the step, the larger the share.
"""

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch

from pl_pipe.callbacks.best_checkpoint import BestCheckpoint
from pl_pipe.callbacks.last_checkpoint import LastCheckpoint
from pl_pipe.callbacks.run_summary import RunSummary
from pl_pipe.recipes.vision.classifier import ImageClassifier
from pl_pipe.recipes.vision.synthetic import SyntheticImages


class StepClock(L.Callback):
    """Seconds per step over an epoch, the first steps left out; the same callback on both sides."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.per_step_s = 0.0
        self._since = 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.warmup:
            self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        batches = int(trainer.num_training_batches) - self.warmup
        self.per_step_s = (time.perf_counter() - self._since) / batches


def step_s(callbacks: list[L.Callback], steps: int, width: float) -> float:
    torch.manual_seed(0)
    model = ImageClassifier("vgg16", num_classes=10, image_size=32, width=width, lr=0.01)
    data = SyntheticImages(batch_size=8, num_samples=8 * steps, num_val_samples=8)
    clock = StepClock(warmup=20)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, enable_checkpointing=bool(callbacks), callbacks=[clock, *callbacks],
    )  # fmt: skip
    trainer.fit(model, datamodule=data)
    return clock.per_step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=float, default=0.05)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    plain, ours = [], []
    for _ in range(arguments.repeats):
        plain.append(step_s([], arguments.steps, arguments.width))
        with tempfile.TemporaryDirectory() as folder:
            callbacks = [RunSummary(), BestCheckpoint(str(Path(folder))), LastCheckpoint(str(Path(folder)))]
            ours.append(step_s(callbacks, arguments.steps, arguments.width))
    ratios = [b / a for a, b in zip(plain, ours, strict=True)]
    for name, values in (("plain Trainer", plain), ("with callbacks", ours)):
        median = statistics.median(values)
        print(f"{name:15} {median * 1e3:7.2f} ms/step  (min {min(values) * 1e3:.2f}, max {max(values) * 1e3:.2f})")
    print(f"{'ratio':15} {statistics.median(ratios):7.3f}          (min {min(ratios):.3f}, max {max(ratios):.3f})")


if __name__ == "__main__":
    main()
