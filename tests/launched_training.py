"""A user's script over three ranks that Lightning's launcher starts; what befalls it is chosen by its arguments.

    python launched_training.py FOLDER WHAT RANK [RANKS]       WHAT: a signal's name, `start` or `terminal`

`start`: the rank ends before it has met the others. `terminal`: the rank presses Ctrl-C for its whole process group.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from pipedream_models import loader, make

from pl_pipe.strategies import PipeDreamStrategy

TIMEOUT_S = 15.0


class Befall(L.Callback):
    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 7 and trainer.global_rank == self.rank:
            if self.what == "terminal":
                os.killpg(os.getpgrp(), signal.SIGINT)
            else:
                os.kill(os.getpid(), getattr(signal, self.what))


def main(folder: Path, what: str, rank: int, ranks: int = 3) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
    me = int(os.environ.get("LOCAL_RANK", "0"))
    L.seed_everything(1)
    strategy = PipeDreamStrategy(split_points=["layers.0", "layers.2"][: ranks - 1], timeout_s=TIMEOUT_S)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=3,
        callbacks=[
            Befall(what, rank),
            ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_last=True),
            ModelCheckpoint(folder / "interrupted", save_on_exception=True, every_n_epochs=9, filename="{step}"),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if what == "start" and me == rank:
        if rank == 0:
            strategy.setup_environment = lambda: os.kill(os.getpid(), signal.SIGKILL)  # its children run by then
        else:
            os._exit(3)
    trainer.fit(make("Mlp"), loader(), loader(seed=50, samples=7))
    sys.stdout.write(f"rank {me} finished\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
