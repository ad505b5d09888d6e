"""Regression where the module keeps self.last_loss and a list of losses for a plot at the end (forum style)."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
L.seed_everything(0)


class Net(L.LightningModule):
    def __init__(self, in_dim=10, hidden=24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
        self.criterion = nn.MSELoss()
        self.last_loss = None
        self.train_losses = []
        self.val_losses = []

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        y_hat = self.forward(x)
        loss = self.criterion(y_hat, y)
        self.last_loss = loss
        self.train_losses.append(loss.detach().item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.val_losses.append(loss.item())
        return loss

    def on_train_epoch_end(self):
        self.log("last_loss", self.last_loss.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


x = torch.randn(96, 10)
y = x.sum(dim=1, keepdim=True).sin() + 0.05 * torch.randn(96, 1)
train = DataLoader(TensorDataset(x[:80], y[:80]), batch_size=10)
val = DataLoader(TensorDataset(x[80:], y[80:]), batch_size=8)

model = Net()
trainer = L.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, num_sanity_val_steps=0)
trainer.fit(model, train, val)

result_train_losses = model.train_losses
result_val_losses = model.val_losses
result_last_loss = float(model.last_loss)
