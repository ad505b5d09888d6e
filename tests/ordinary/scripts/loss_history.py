"""Losses, step by step: a callback keeps them, a progress line shows the mean of the last ten."""

from collections import deque

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
        self.recent = deque(maxlen=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.layers(x).squeeze(1), y)
        self.recent.append(loss.item())
        self.log("recent", sum(self.recent) / len(self.recent), prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class LossHistory(L.Callback):
    def __init__(self):
        self.losses, self.best = [], float("inf")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(loss.item())
        if self.losses[-1] < self.best:
            self.best = self.losses[-1]

    def on_train_end(self, trainer, pl_module):
        pl_module.print(f"{len(self.losses)} steps, best {self.best:.4f}")


L.seed_everything(8)
x = torch.randn(80, 12)
history = LossHistory()
model = Regressor()
trainer = L.Trainer(max_epochs=3, callbacks=[history], log_every_n_steps=5)
trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1).sin()), batch_size=16))
result_losses = history.losses
result_best = history.best
