"""Exponential moving average of the weights with Lightning's EMAWeightAveraging (the docs' WeightAveraging page)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(61)


class ConvClassifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x):
        return self.head(self.layer2(self.layer1(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


x, y = torch.rand(96, 1, 8, 8), torch.randint(0, 10, (96,))
train = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10, shuffle=True)
val = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=8)
model = ConvClassifier()
checkpoint = ModelCheckpoint(monitor="val_loss", save_last=True)
trainer = L.Trainer(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.9), checkpoint], log_every_n_steps=2)
trainer.fit(model, train, val)
results = trainer.validate(model, val)
result_average = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith("head")}
result_best = checkpoint.best_model_score.item()
