"""Cross-validation: a KFold loop that makes a model and a trainer for each fold (Kaggle style)."""

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torchmetrics.functional.classification import multiclass_accuracy

pl.seed_everything(506)


class DigitsMLP(pl.LightningModule):
    def __init__(self, lr=5e-3):
        super().__init__()
        self.lr = lr
        self.model = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_acc", multiclass_accuracy(logits, y, num_classes=10, average="micro"))

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).softmax(-1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


digits = load_digits()
x = torch.tensor(digits.data[:180], dtype=torch.float32) / 16.0
y = torch.tensor(digits.target[:180])
dataset = TensorDataset(x, y)

oof = np.zeros((len(dataset), 10))
result_scores = []
for train_idx, val_idx in KFold(n_splits=3, shuffle=True, random_state=0).split(x):
    train = DataLoader(Subset(dataset, train_idx), batch_size=15, shuffle=True)
    val = DataLoader(Subset(dataset, val_idx), batch_size=15)
    model = DigitsMLP()
    trainer = pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(model, train, val)
    result_scores.append(trainer.callback_metrics["val_acc"].item())
    oof[val_idx] = torch.cat(trainer.predict(model, val)).numpy()

result_accuracy = float((oof.argmax(1) == y.numpy()).mean())
result_mean = float(np.mean(result_scores))
