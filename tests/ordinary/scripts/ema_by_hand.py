"""A moving average of the weights in a list, kept by the module itself and loaded at the end (diffusion models)."""

import copy

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class Averaged(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Mish(), nn.Linear(24, 24), nn.Mish(), nn.Linear(24, 4))
        self.metrics = MetricCollection({"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4)}, prefix="train_")
        self.average = None

    def on_fit_start(self):
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        seen = self.metrics(logits, y)
        self.log("acc", seen["train_acc"], prog_bar=True)
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for average, p in zip(self.average, self.net.parameters(), strict=True):
            average.lerp_(p.detach(), 0.1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


L.seed_everything(21)
x = torch.randn(64, 8)
model = Averaged()
trainer = L.Trainer(max_epochs=3, log_every_n_steps=1)
trainer.fit(model, DataLoader(TensorDataset(x, x.abs().argmax(1) % 4), batch_size=16, shuffle=True))
averaged = copy.deepcopy(model.net)
for p, average in zip(averaged.parameters(), model.average, strict=True):
    p.data.copy_(average)
result_average = [average.clone() for average in model.average]
result_outputs = averaged(x[:4]).detach()
