"""A collate function that puts one tensor into the batch under two names, and a step that writes to it."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(2)


class Denoiser(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch["input"]), batch["clean"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        batch["input"].mul_(0.5)
        self.log("val_loss", F.mse_loss(self.net(batch["input"]), batch["clean"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def collate(rows):
    x = torch.stack([row[0] for row in rows])
    return {"input": x, "clean": x, "weights": (x, torch.ones(len(rows)))}


data = TensorDataset(torch.randn(48, 5))
model = Denoiser()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(
    model,
    DataLoader(data, batch_size=8, collate_fn=collate, shuffle=True),
    DataLoader(data, batch_size=8, collate_fn=collate),
)
