"""fit called twice on one trainer: a warm-up with a frozen body, then more epochs of everything (fine-tuning)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(507)


class FineTuned(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())
        self.head = nn.Linear(24, 3)
        self.lr = 1e-2

    def freeze_body(self):
        self.body.requires_grad_(False)

    def unfreeze_body(self):
        self.body.requires_grad_(True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(x)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.head(self.body(x)), y))

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


x, y = torch.randn(80, 10), torch.randint(0, 3, (80,))
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
val = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8)

model = FineTuned()
body_before = model.body[0].weight.detach().clone()
model.freeze_body()
trainer = L.Trainer(max_epochs=1, log_every_n_steps=2)
trainer.fit(model, train, val)
result_first = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_body_kept = torch.equal(body_before, model.body[0].weight.cpu())

model.unfreeze_body()
model.lr = 2e-3
trainer.fit_loop.max_epochs = 3
trainer.fit(model, train, val)
result_second = {k: v.item() for k, v in trainer.callback_metrics.items()}
result_body_moved = (model.body[0].weight.detach() - body_before).norm().item()
result_steps = (trainer.global_step, trainer.current_epoch)
