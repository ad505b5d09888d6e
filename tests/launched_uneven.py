"""A user's script over four workers that Lightning's launcher starts; one of them is killed on the way.

python launched_uneven.py FOLDER STRATEGY
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from pipedream_models import loader, make

import pl_pipe  # noqa: F401 - registers the strategies' names

KILLED = 2


class Kill(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.02)
        rank = getattr(trainer.strategy, "overall_rank", trainer.global_rank)
        if rank == KILLED and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, strategy: str) -> None:
    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        max_epochs=3,
        callbacks=[Kill(), ModelCheckpoint(folder / "kept", filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make("Mlp"), loader(samples=80, shuffle=True), loader(seed=50, samples=8))
    sys.stdout.write(f"rank {trainer.global_rank} finished epoch {trainer.current_epoch}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
