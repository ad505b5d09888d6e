"""A user's script over three ranks that Lightning's launcher starts; what befalls it is chosen by its arguments.

    python launched_training.py FOLDER WHAT RANK       WHAT: a signal's name, or `start`

`start`: the rank ends before it has met the others.
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

TIMEOUT_S = 8.0


class Befall(L.Callback):
    def __init__(self, what: str, rank: int) -> None:
        self.what, self.rank = what, rank

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 7 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), getattr(signal, self.what))


def main(folder: Path, what: str, rank: int) -> None:
    me = int(os.environ.get("LOCAL_RANK", "0"))
    L.seed_everything(1)
    strategy = PipeDreamStrategy(split_points=["layers.0", "layers.2"], timeout_s=TIMEOUT_S)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        max_epochs=3,
        callbacks=[Befall(what, rank), ModelCheckpoint(folder / "kept", every_n_train_steps=2, save_last=True)],
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
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
