"""A step that looks at loss.item() and, where it is high, uses an early module a second time (research code)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(21)


class HardExampleNet(L.LightningModule):
    def __init__(self, num_classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.middle = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, num_classes)
        self.hard_batches = []

    def forward(self, x):
        return self.head(self.middle(self.stem(x)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        if loss.item() > 1.3:
            # regularise the stem on hard batches: features should survive a bit of noise
            noisy = x + 0.1 * x.flip(0)
            loss = loss + 0.5 * F.mse_loss(self.stem(noisy), self.stem(x).detach())
            self.hard_batches.append((self.current_epoch, batch_idx))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.log("hard_batches", float(len(self.hard_batches)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


x = torch.randn(80, 12)
y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
model = HardExampleNet()
trainer = L.Trainer(max_epochs=2, log_every_n_steps=1)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
result_hard = model.hard_batches
result_metrics = {k: v.item() for k, v in trainer.callback_metrics.items()}
