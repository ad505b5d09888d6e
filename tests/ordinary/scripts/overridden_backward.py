"""backward overridden, gradients inspected and scaled in on_after_backward (docs' hooks)."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L.seed_everything(501)


class CustomBackward(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(10, 24)
        self.block = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))
        self.head = nn.Linear(24, 4)
        self.grad_norms = []

    def forward(self, x):
        h = self.stem(x)
        h = h + self.block(h)
        return self.head(h)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def backward(self, loss):
        # a loss scale of our own
        (loss * 8.0).backward()

    def on_after_backward(self):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.div_(8.0)

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        total = torch.stack(norms).norm()
        self.grad_norms.append(total.item())
        self.log("grad_norm", total)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=5e-3)


data = TensorDataset(torch.randn(80, 10), torch.randint(0, 4, (80,)))
model = CustomBackward()
trainer = L.Trainer(max_epochs=1, log_every_n_steps=1)
trainer.fit(model, DataLoader(data, batch_size=10, shuffle=True))
result_grad_norms = model.grad_norms
result_loss = trainer.callback_metrics["train_loss"].item()
