"""Random kills of a pipeline's ranks: does anything hang, stay behind, or leave a checkpoint that cannot be read?

    python benchmarks/pipeline/kills.py [--kills 50] [--ranks 3] [--timeout-s 20] [--seed 1]

One small training saves a checkpoint every few steps. Again and again a random rank is killed (SIGKILL), a random time
after a random number of batches, so also while ranks save or validate; then training goes on from the last checkpoint.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from multiprocessing import connection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from ranks import _CONTEXT, _free_port, busy, prepare
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pl_pipe.strategies import PipeDreamStrategy

WIDTH, LAYERS = 256, 6
SETUP_S = 60.0
LONGEST = 24  # batches before a kill; an epoch has 20


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Progress(Callback):
    """Tells that some batches are done, so that kills hit training, whatever the machine's pace."""

    def __init__(self, began: Any, batches: int) -> None:
        self.began, self.batches = began, batches

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches -= 1
        if self.batches == 0:
            self.began.set()


def train(folder: Path, rank: int, ranks: int, port: int, timeout_s: float, began: Any, batches: int) -> None:
    """One rank's life, which ends by an error or by a kill; training itself would go on for long."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0")
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), PL_PIPE_CACHE=str(folder / "cache"))
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    L.seed_everything(1)
    data = DataLoader(TensorDataset(torch.randn(320, WIDTH)), batch_size=16)
    cuts = [f"layers.{LAYERS * stage // ranks - 1}" for stage in range(1, ranks)]
    last = folder / "kept" / "last.ckpt"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipeDreamStrategy(split_points=cuts, timeout_s=timeout_s),
        max_epochs=-1,
        callbacks=[ModelCheckpoint(folder / "kept", every_n_train_steps=3, save_last=True), Progress(began, batches)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), data, data, ckpt_path=str(last) if last.exists() else None)


class Tally:
    """What came of the kills."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.hangs = self.unreadable = self.unnamed = 0
        self.steps: list[int] = []

    def row(self) -> str:
        later = sum(second > first for first, second in zip(self.steps, self.steps[1:], strict=False))
        return (
            f"{len(self.seconds)} kills: {self.hangs} hangs, {self.unreadable} unreadable checkpoints, "
            f"{self.unnamed} ranks that ended without naming the killed one; all ended after "
            f"{np.median(self.seconds):.2f} s (median; at most {max(self.seconds):.2f} s); last step saved "
            f"{self.steps[-1] if self.steps else 0}, {later} runs went further than the one before"
        )


def kill_one(folder: Path, *, ranks: int, timeout_s: float, chance: random.Random, tally: Tally) -> None:
    port, began = _free_port(), _CONTEXT.Event()
    batches = chance.randint(1, LONGEST)
    processes = [
        _CONTEXT.Process(target=train, args=(folder, rank, ranks, port, timeout_s, began, batches))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    victim = chance.randrange(ranks)
    training = began.wait(SETUP_S)
    time.sleep(chance.uniform(0, 0.5))
    killed_s = time.monotonic()
    os.kill(processes[victim].pid, signal.SIGKILL)
    waiting = [process.sentinel for process in processes]
    while waiting and time.monotonic() < killed_s + 2 * timeout_s:
        for ended in connection.wait(waiting, timeout=1.0):
            waiting.remove(ended)
    tally.seconds.append(time.monotonic() - killed_s)
    tally.hangs += bool(waiting)
    for process in processes:
        process.kill()
        process.join()
    logs = {rank: (folder / f"rank{rank}.log").read_text() for rank in range(ranks) if rank != victim}
    unnamed = [rank for rank, text in logs.items() if f"PeerError: rank {victim} (stage" not in text]
    tally.unnamed += len(unnamed)
    for rank in unnamed:
        print(f"rank {rank}, after rank {victim} was killed ({training=}):\n{logs[rank][-1500:]}")
    if not (folder / "kept" / "last.ckpt").exists():  # killed before there was one
        return
    try:
        content = torch.load(folder / "kept" / "last.ckpt", weights_only=True)
        tally.steps.append(int(content["global_step"]))
    except Exception as error:
        tally.unreadable += 1
        print(f"unreadable: {error!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    prepare()
    chance, tally = random.Random(arguments.seed), Tally()
    print(busy(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, arguments.kills + 1):
            kill_one(Path(folder), ranks=arguments.ranks, timeout_s=arguments.timeout_s, chance=chance, tally=tally)
            print(f"{number}: {tally.seconds[-1]:.2f} s, step {tally.steps[-1] if tally.steps else 0}", flush=True)
    print(tally.row())


if __name__ == "__main__":
    main()
