"""A user's script under torchrun, whose number of workers changes by a schedule.

    torchrun --nnodes 1:3 … elastic_training.py FOLDER SCHEDULE

Every rank notes, step by step, which samples it saw and what the weight was after the step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.adapt.policies import ElasticPolicy
from pl_pipe.strategies import AdaptiveCommStrategy

SAMPLES, BATCH, RATE, MOMENTUM = 80, 2, 0.1, 0.5


class Mean(L.LightningModule):
    """Whose gradient is w - mean(x)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.w = folder, torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = [int(value) for value in batch[0]]
        return 0.5 * (self.w - batch[0].double()).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer = self.trainer
        note = {
            "epoch": trainer.current_epoch, "step": trainer.global_step, "ranks": trainer.world_size,
            "rank": trainer.global_rank, "seen": self.seen, "w": self.w.item(), "at_s": time.time(),
        }  # fmt: skip
        with (self.folder / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(note) + "\n")

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            with (self.folder / "epochs.txt").open("a") as file:
                file.write(f"{self.trainer.current_epoch} {self.lr_schedulers().last_epoch}\n")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)]


def main(folder: Path, schedule: str) -> None:
    torch.set_num_threads(1)
    L.seed_everything(1)
    policy = ElasticPolicy(folder=folder, schedule=schedule, most=3, wait_s=60.0)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_epochs=2, callbacks=[policy],
        strategy=AdaptiveCommStrategy("ring", adapt=False, timeout_s=60.0), logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    loader = DataLoader(TensorDataset(torch.arange(float(SAMPLES))), batch_size=BATCH, shuffle=True)
    trainer.fit(Mean(folder), loader, ckpt_path=ElasticPolicy.checkpoint(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
