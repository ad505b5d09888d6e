"""What Lightning's loop takes of a step on a GPU: a module of one small layer, whose step computes next to nothing.

    python benchmarks/fusion/lightning_loop.py

The same through FusionStrategy is in speed.csv, for arrays of few variants: their steps wait for the loop.
"""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

_SETTLED, _TIMED = 300, 2000


class Nothing(L.LightningModule):
    """Steps are skipped (Lightning's hooks alone), or have a loss that is logged, a backward and an optimizer."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.learns = learns

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if not self.learns:
            return None
        loss = self.layer.weight.sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Batches:
    """The same one, which is on the device."""

    def __init__(self, device: str) -> None:
        self._batch = torch.ones(1, device=device)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(_SETTLED + _TIMED):
            yield self._batch


class Clock(L.Callback):
    def __init__(self) -> None:
        self.step_s, self._began = 0.0, 0.0

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        done = batch_idx + 1
        if done in (_SETTLED, _SETTLED + _TIMED):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.step_s, self._began = (now - self._began) / _TIMED, now


def main() -> None:
    warnings.filterwarnings("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for learns, told in ((False, "skipped"), (True, "with loss, log, backward and optimizer")):
        clock = Clock()
        trainer = L.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=1, logger=False, callbacks=[clock],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=50,
        )  # fmt: skip
        trainer.fit(Nothing(learns=learns), Batches(device))
        print(f"{1e3 * clock.step_s:.3f} ms a step, {told}")


if __name__ == "__main__":
    main()
