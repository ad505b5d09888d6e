"""GradientAccumulationScheduler: more batches a step as training goes on, an odd number of batches an epoch."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(520)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10))
        self.steps = []

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps.append(self.trainer.global_step)

    def configure_optimizers(self):
        return torch.optim.Adadelta(self.parameters(), lr=0.5)


data = TensorDataset(torch.randn(72, 10))
model = Net()
# till 1st epoch: every batch, then 2, then 4
accumulator = GradientAccumulationScheduler(scheduling={0: 1, 1: 2, 2: 4})
trainer = L.Trainer(max_epochs=3, callbacks=[accumulator], log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
result_steps = model.steps
result_loss = trainer.callback_metrics["train_loss"].item()
