"""The learning-rate finder through Tuner, then training with what it suggested (docs' page)."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.tuner import Tuner
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(27)


class LitModel(L.LightningModule):
    def __init__(self, learning_rate=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=(self.hparams.learning_rate or self.learning_rate))


digits = load_digits()
x = torch.tensor(digits.data[:128], dtype=torch.float32) / 16
y = torch.tensor(digits.target[:128])
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)

model = LitModel()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=2)
tuner = Tuner(trainer)

# Run learning rate finder
lr_finder = tuner.lr_find(model, train_dataloaders=loader, num_training=30)

# Results can be found in
result_losses = [float(v) for v in lr_finder.results["loss"]]

# Pick point based on plot, or get suggestion
new_lr = lr_finder.suggestion()

# update hparams of the model
model.hparams.learning_rate = new_lr
result_lr = new_lr

# Fit model
trainer.fit(model, loader)
result_train_loss = trainer.callback_metrics["train_loss"].item()
