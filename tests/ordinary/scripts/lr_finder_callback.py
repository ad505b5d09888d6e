"""LearningRateFinder as a callback: the search stops early, training goes on with its rate (docs' page of it)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateFinder
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


L.seed_everything(28)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data[:192], dtype=torch.float32) / 16, torch.tensor(digits.target[:192]))
train = DataLoader(data, batch_size=16, shuffle=True)
val = DataLoader(data, batch_size=64)

finder = LearningRateFinder(min_lr=1e-3, max_lr=50.0, num_training_steps=40, early_stop_threshold=2.0)
trainer = L.Trainer(max_epochs=2, log_every_n_steps=3, callbacks=[finder])
model = Classifier()
trainer.fit(model, train, val)

result_lr = model.hparams.lr
result_lrs = list(finder.optimal_lr.results["lr"])
result_losses = [float(loss) for loss in finder.optimal_lr.results["loss"]]
result_steps = trainer.global_step
